"""Random ops of a program: counted, equal to the eager program's under `counted_random`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import InputKind
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, counted_random, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.runtime.single import run_graph

SCALARS = {"seed": 3, "step": 7, "lr": 0.1}


class _Drawing(nn.Module):
    """A linear layer whose result meets random numbers."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4, dtype=torch.float64)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.head(x))


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def _batch() -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)}


def _attention(x: Tensor) -> Tensor:
    heads = x.reshape(1, 2, 2, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of all": lambda x: x.sum() * 0 + F.dropout(x, 1.0).sum(),
    "feature dropout": lambda x: F.dropout1d(x, 0.5),
    "attention": _attention,
    "rand": lambda x: x * torch.rand(4, 4, dtype=torch.float64),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(4),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal_": lambda x: x + torch.empty_like(x).normal_(1.0, 0.5),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 2),
    "randint": lambda x: x * torch.randint(0, 5, (4, 4)),
    "randint_like": lambda x: x + torch.randint_like(x, 3),
    "random_": lambda x: x * torch.empty(4, dtype=torch.int64).random_(2, 9),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli of a number": lambda x: x * torch.bernoulli(torch.zeros(4, 4), 0.25),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(2.0),
    "normal of tensors": lambda x: x + torch.normal(x.detach(), x.detach().abs()),
    "gumbel softmax": lambda x: F.gumbel_softmax(x),
    "randperm": lambda x: x[torch.randperm(4)] * torch.arange(4).unsqueeze(1),
    "multinomial": lambda x: x.gather(1, torch.multinomial(x.detach().exp(), 2)),
    "multinomial with replacement": lambda x: x.gather(
        1, torch.multinomial(x.detach().exp(), 3, replacement=True)
    ),
    "rrelu": lambda x: F.rrelu(x, 0.1, 0.4, training=False) + torch.rand_like(x),
    "stochastic depth": lambda x: x * torch.rand(4, 1).add(0.7).floor() / 0.7,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_captured_step_draws_what_eager_draws_under_counted_random(name: str) -> None:
    torch.manual_seed(0)
    model, batch = _Drawing(DRAWS[name]), _batch()
    graph = capture(model, _loss, batch)

    outputs, _ = run_graph(graph, initial_states(model), [batch], SCALARS)

    with counted_random(3, 7):
        expected = _loss(model, batch)
    torch.testing.assert_close(outputs["loss"], expected.detach(), rtol=1e-14, atol=1e-14)
    with counted_random(3, 8):
        other = _loss(model, batch)
    if name != "dropout of all":
        assert not torch.equal(other, expected)


def test_two_ops_draw_different_numbers() -> None:
    model = _Drawing(lambda x: x * 0 + (torch.rand_like(x) - torch.rand_like(x)).abs())

    with counted_random(0, 0):
        loss = _loss(model, _batch())

    assert loss > 0.01


def test_the_graph_counts_with_seed_and_draw() -> None:
    graph = capture(_Drawing(DRAWS["dropout"]), _loss, _batch())

    assert graph.input_kinds["seed"].kind is InputKind.SCALAR
    assert graph.input_kinds["draw"].kind is InputKind.RNG
    assert not any("seeded" in node.tags for node in graph.nodes)
    plain = capture(_Drawing(lambda x: x), _loss, _batch())
    assert "seed" not in plain.input_kinds


def test_a_missing_step_is_named() -> None:
    model, batch = _Drawing(DRAWS["dropout"]), _batch()
    graph = capture(model, _loss, batch)

    with pytest.raises(SbpValueError, match="scalar 'step' is missing"):
        run_graph(graph, initial_states(model), [batch], {"seed": 0})


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", ["dropout", "attention", "rand", "multinomial"])
@pytest.mark.parametrize("axes", [("data",), ("pipe",)])
def test_any_mesh_draws_the_numbers_of_one_device(name: str, axes: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, num_micro_batches = nn.Sequential(_Drawing(DRAWS[name]), nn.Flatten(0)), 2
    model = nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), *model)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = torch.optim.SGD(eager.parameters(), lr=0.1)
    graph = prepare_step(capture(model, _loss, _batch(), optimizer), num_micro_batches)
    mesh = Placement.grid((2,), axes)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())
    strategy = infer_strategy(request, planner="test", pins={"batch": "S(0)"})
    plan = compile_plan(graph, strategy)
    check(plan)
    session = ReferenceSession(plan, initial_states(model, optimizer), ReferenceConfig())

    for step in range(2):
        whole = {"x": torch.cat([_batch()["x"], _batch()["x"] * 2])}
        loss = session.step(whole, {"lr": 0.1, "seed": 3, "step": step}).loss
        twin.zero_grad()
        expected = 0.0
        for index, part in enumerate(whole["x"].split(4)):
            with counted_random(3, step * num_micro_batches + index):
                own = _loss(eager, {"x": part}) / num_micro_batches
            own.backward()
            expected += own.item()
        twin.step()

        assert loss.item() == pytest.approx(expected, rel=1e-12)
    states = session.state_dict()
    for key, value in eager.named_parameters():
        torch.testing.assert_close(states[key], value.detach(), rtol=1e-12, atol=1e-12)


def test_per_shard_random_asks_for_streams() -> None:
    graph = capture(_Drawing(DRAWS["dropout"]), _loss, _batch(), per_shard_random=True)

    (node,) = [node for node in graph.nodes if node.op.startswith("sbp.random_")]
    assert node.kwargs["per_shard"] is True
