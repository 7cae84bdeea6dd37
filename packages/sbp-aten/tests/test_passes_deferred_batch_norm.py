"""Deferred batch normalisation computes what GPipe's paper says, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from sbp_aten.pass_options import LossMeaning, PassOptions
from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.errors import GraphError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.runtime.single import run_graph

MEAN, WHOLE = LossMeaning.MEAN_OF_MICRO_BATCHES, LossMeaning.WHOLE_BATCH
DEFERRED = PassOptions(deferred_batch_norm=True)
STEPS = 3

Batch = dict[str, Tensor]


class Twice(nn.Module):
    """Calls one layer twice, which then updates its statistics twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.norm(self.up(x)).tanh()))


class Own(nn.BatchNorm1d):
    """A layer of a program's own, without a counter."""

    def __init__(self) -> None:
        super().__init__(3)
        self.num_batches_tracked = None

    def forward(self, x: Tensor) -> Tensor:
        means, training = (self.running_mean, self.running_var), self.training
        return functional.batch_norm(x, *means, self.weight, self.bias, training=training)


def _dense(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *norm, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (lambda: _dense(nn.BatchNorm1d(4), nn.Tanh()), (3,)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)), (3, 5)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)),
        (3, 4, 4),
    ),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(3, 4, 2), nn.BatchNorm3d(4)), (3, 3, 3, 3)),
    "no weights": (lambda: _dense(nn.BatchNorm1d(4, affine=False), nn.Tanh()), (3,)),
    "no statistics": (lambda: _dense(nn.BatchNorm1d(4, track_running_stats=False)), (3,)),
    "twice": (Twice, (3,)),
    "a function": (lambda: nn.Sequential(Own(), nn.Linear(3, 4)), (3,)),
    "an instance norm before": (
        lambda: nn.Sequential(nn.InstanceNorm1d(3), nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)),
        (3, 5),
    ),
    "a model that is a norm": (lambda: nn.BatchNorm1d(3), (3,)),
}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    made = model(batch["x"])
    return (made * made.detach().cos() + batch["toward"] * made).square().mean()


def ratio_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that is no mean over samples, so that the meanings of the loss differ."""
    weights = batch["toward"].square()
    return ((model(batch["x"]) - 1).square() * weights).sum() / weights.sum()


def _build(name: str) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    for parameter in model.parameters():  # weights of norms begin at 1 and 0
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    batches = [torch.randn(16, *shape, dtype=torch.float64) * 2 + at for at in range(STEPS)]
    toward = [torch.randn_like(model.eval()(x)) for x in batches]
    return model.train(), [{"x": x, "toward": one} for x, one in zip(batches, toward, strict=True)]


def _norms(model: nn.Module) -> list[nn.Module]:
    return [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]


class PaperNorm:
    """What GPipe's paper says of one batch norm, in plain PyTorch.

    Args:
        norm: The layer, whose forward is replaced.
        num_parts: Number of micro-batches in the data of one call.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, num_parts: int) -> None:
        self.norm, self.num_parts, self.seen = norm, num_parts, []
        norm.forward = self.forward

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        norm = self.norm
        normalise = partial(functional.batch_norm, training=True, eps=norm.eps)
        parts = x.tensor_split(self.num_parts)
        return torch.cat([normalise(p, None, None, norm.weight, norm.bias) for p in parts])

    def end_mini_batch(self, calls: int) -> None:
        """Update the statistics as the layer does that sees the mini-batch at once."""
        for call in range(len(self.seen) // calls):
            whole = torch.cat(self.seen[call :: len(self.seen) // calls])
            type(self.norm).forward(self.norm, whole)
        self.seen = []


def paper(
    model: nn.Module, batches: list[Batch], loss, optimizer, num: int, meaning: LossMeaning
) -> list[Tensor]:
    """Train a model as the paper says; return the losses of steps."""
    several = num if meaning is MEAN else 1
    norms = [PaperNorm(one, num // several) for one in _norms(model)]
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        parts = [
            {name: value.tensor_split(several)[at] for name, value in batch.items()}
            for at in range(several)
        ]
        each = [loss(model, part) / several for part in parts]
        for one in each:
            one.backward()
        optimizer.step()
        with torch.no_grad():
            for norm in norms:
                norm.end_mini_batch(several)
        losses.append(sum(one.detach() for one in each))
    return losses


def prepared(
    model: nn.Module, loss, optimizer, batch: Batch, num: int, meaning: LossMeaning, options
) -> LogicalGraph:
    """Return the step for planning."""
    count = num if meaning is MEAN else 1
    part = {name: value.tensor_split(count)[0] for name, value in batch.items()}
    graph = capture(model, loss, part, optimizer)
    return prepare_step(graph, num, options=options, loss=meaning)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _close(found: Mapping[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("meaning", [MEAN, WHOLE])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_computes_what_the_paper_says(name, num, meaning, split):
    model, batches = _build(name)
    options = PassOptions(deferred_batch_norm=True, split_batch_norm=split)
    optimizer = _sgd(model)
    graph = prepared(model, ratio_loss, optimizer, batches[0], num, meaning, options)
    states = initial_states(model, optimizer)

    losses = []
    for batch in batches:
        parts = [
            {key: value.tensor_split(num)[at] for key, value in batch.items()} for at in range(num)
        ]
        outputs, states = run_graph(graph, states, parts, {"lr": 0.1})
        losses.append(outputs["loss"])

    expected = paper(model, batches, ratio_loss, optimizer, num, meaning)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    _close(states, model)


def test_the_variance_is_that_of_nn_batch_norm_and_not_that_of_torchgpipe() -> None:
    model, batches = _build("a model that is a norm")
    x = batches[0]["x"]
    graph = prepared(model, mean_loss, _sgd(model), batches[0], 4, MEAN, DEFERRED)
    states = initial_states(model, _sgd(model))
    parts = [{k: v.tensor_split(4)[at] for k, v in batches[0].items()} for at in range(4)]

    _, new = run_graph(graph, states, parts, {"lr": 0.1})

    # torchgpipe 0.0.7, batchnorm.py: sum_squares / counter - mean ** 2, which is the biased one.
    biased = (x.square().sum(0) / len(x) - x.mean(0) ** 2) * 0.1 + 0.9
    torch.testing.assert_close(new["running_var"], 0.9 + 0.1 * x.var(0), rtol=1e-12, atol=0)
    assert not torch.allclose(new["running_var"], biased, rtol=1e-3)
    assert int(new["num_batches_tracked"]) == 1


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("meaning", [MEAN, WHOLE])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        (Placement.grid((2,), ("data",)), {"batch": "S(0)", "use:batch": "S(0)"}),
        (Placement.grid((3,), ("data",)), {"batch": "S(0)", "use:batch": "S(0)"}),
        (Placement.grid((2,), ("pipe",)), {}),
        (Placement.grid((2, 2), ("pipe", "data")), {"batch": "S(0)"}),
    ],
    ids=["data", "uneven", "two stages", "stages of two ranks"],
)
@pytest.mark.parametrize("name", ["vectors", "images", "twice"])
def test_every_layout_computes_what_the_paper_says(
    name: str, mesh: Placement, pins: Mapping[str, str], num: int, meaning: LossMeaning
) -> None:
    model, batches = _build(name)
    optimizer = _sgd(model)
    graph = prepared(model, ratio_loss, optimizer, batches[0], num, meaning, DEFERRED)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins=pins))
    check(plan)
    states = initial_states(model, optimizer)

    session = ReferenceSession(plan, states, ReferenceConfig())
    losses = [session.step(batch, {"lr": 0.1}).loss for batch in batches]

    assert len(plan.stages) == (2 if "pipe" in mesh.axes else 1)
    expected = paper(model, batches, ratio_loss, optimizer, num, meaning)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    _close(session.state_dict(), model)


@pytest.mark.parametrize("meaning", [MEAN, WHOLE])
def test_gradients_that_are_constants_are_cut_as_well(meaning: LossMeaning) -> None:
    model, (batch, *_) = _build("twice")
    optimizer = _sgd(model)
    parts = [{k: v.tensor_split(4)[at] for k, v in batch.items()} for at in range(4)]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).mean()

    graph = prepared(model, loss, optimizer, batch, 4, meaning, DEFERRED)
    outputs, new = run_graph(graph, initial_states(model, optimizer), parts, {"lr": 0.1})

    (expected,) = paper(model, [batch], loss, optimizer, 4, meaning)
    torch.testing.assert_close(outputs["loss"], expected, rtol=1e-9, atol=1e-9)
    _close(new, model)


@pytest.mark.parametrize("per_update", [1, 2, 4])
def test_the_mini_batch_is_that_of_an_update(per_update: int) -> None:
    model, (batch, *_) = _build("vectors")
    optimizer = _sgd(model)
    parts = [{k: v.tensor_split(4)[at] for k, v in batch.items()} for at in range(4)]
    graph = prepare_step(
        capture(model, mean_loss, parts[0], optimizer),
        4,
        options=DEFERRED,
        loss=LossMeaning.EACH_MICRO_BATCH,
        micro_batches_per_update=per_update,
    )

    _, new = run_graph(graph, initial_states(model, optimizer), parts, {"lr": 0.1})

    updates = [
        {name: torch.cat([one[name] for one in parts[at : at + per_update]]) for name in batch}
        for at in range(0, 4, per_update)
    ]
    for mini_batch in updates:
        paper(model, [mini_batch], mean_loss, optimizer, per_update, MEAN)
        for norm in _norms(model):
            del norm.forward
    _close(new, model)


@given(
    samples=st.integers(1, 3),
    num=st.integers(2, 4),
    positions=st.lists(st.integers(1, 3), max_size=3),
    momentum=st.floats(0, 1),
    affine=st.booleans(),
    meaning=st.sampled_from([MEAN, WHOLE]),
)
@settings(max_examples=15, deadline=None)
def test_shapes_and_momenta(samples, num, positions, momentum, affine, meaning) -> None:
    assume(samples * prod(positions) > 1)  # PyTorch refuses one value a channel
    torch.manual_seed(0)
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    norm = kind[len(positions)](2, momentum=momentum, affine=affine)
    scale = nn.Linear(positions[-1] if positions else 2, positions[-1] if positions else 2)
    model = nn.Sequential(scale, norm).double()
    x = torch.randn(samples * num, 2, *positions, dtype=torch.float64)
    batch = {"x": x, "toward": torch.randn_like(x)}
    optimizer = _sgd(model)
    graph = prepared(model, ratio_loss, optimizer, batch, num, meaning, DEFERRED)
    parts = [{k: v.tensor_split(num)[at] for k, v in batch.items()} for at in range(num)]

    outputs, new = run_graph(graph, initial_states(model, optimizer), parts, {"lr": 0.1})

    (loss,) = paper(model, [batch], ratio_loss, optimizer, num, meaning)
    torch.testing.assert_close(outputs["loss"], loss, rtol=1e-9, atol=1e-9)
    _close(new, model)


@pytest.mark.parametrize("meaning", [MEAN, WHOLE])
@pytest.mark.parametrize("affine", [True, False])
def test_under_autocast_statistics_are_as_exact_as_those_of_the_layer(affine, meaning) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=affine), nn.Linear(4, 4))
    x = torch.randn(16, 3)
    batch = {"x": x, "toward": torch.randn(16, 4)}
    optimizer = _sgd(model)
    part = {k: v.tensor_split(4 if meaning is MEAN else 1)[0] for k, v in batch.items()}
    graph = capture(model, ratio_loss, part, optimizer, autocast="bfloat16")
    graph = prepare_step(graph, 4, options=DEFERRED, loss=meaning)
    parts = [{k: v.tensor_split(4)[at] for k, v in batch.items()} for at in range(4)]

    _, new = run_graph(graph, initial_states(model, optimizer), parts, {"lr": 0.1})

    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model[:2](x)  # the mini-batch at once
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(new[name], model.state_dict()[name], rtol=1e-5, atol=1e-6)


class Reads(nn.Module):
    """Reads running statistics after the layer has changed them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm, self.name = nn.BatchNorm1d(3), name

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.norm.get_buffer(self.name)


@pytest.mark.parametrize("meaning", [MEAN, WHOLE])
@pytest.mark.parametrize("name", ["running_mean", "num_batches_tracked"])
def test_reading_what_is_deferred_is_refused(name: str, meaning: LossMeaning) -> None:
    model = Reads(name)
    batch = {"x": torch.randn(8, 3), "toward": torch.randn(8, 3)}

    with pytest.raises(GraphError, match=f"reads 'norm.{name}' in each micro-batch") as caught:
        prepared(model, mean_loss, _sgd(model), batch, 2, meaning, DEFERRED)

    assert "test_passes_deferred_batch_norm.py" in str(caught.value)


@pytest.mark.parametrize("meaning", [MEAN, WHOLE])
def test_other_operators_of_batch_normalisation_are_refused(meaning: LossMeaning) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            norm = torch.ops.aten._native_batch_norm_legit.no_stats
            return norm(x, self.weight, self.weight, True, 0.1, 1e-5)[0]

    model = Model()
    batch = {"x": torch.randn(8, 3), "toward": torch.randn(8, 3)}

    with pytest.raises(GraphError, match="cannot be deferred"):
        prepared(model, mean_loss, _sgd(model), batch, 2, meaning, DEFERRED)


ROWS = {
    "features": (lambda x: x.T[:4], "where samples are along dim 0"),
    "two views": (lambda x: torch.cat([x, x * 2]), "where samples are along dim 0"),
    "some samples": (lambda x: x[:4], "combines samples, or depends on their positions"),
    "what all samples give": (lambda x: (x.T @ x).detach(), "has no samples to cut"),
    "random numbers": (lambda x: torch.randn(8, 8), "has no samples to cut"),
    "constants": (lambda x: torch.arange(64.0).view(8, 8), None),
    "rows of each sample": (lambda x: x[:, None].expand(-1, 2, -1).reshape(16, 8), None),
}


@pytest.mark.parametrize("name", ROWS)
def test_data_of_a_norm_are_cut_only_into_samples(name: str) -> None:
    rows, refused = ROWS[name]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        made = model["head"](batch["x"])
        return made.square().mean() + (model["norm"](rows(made)) - 1).pow(4).mean()

    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(8), "head": nn.Linear(8, 8)})
    batch, optimizer = {"x": torch.randn(8, 8)}, _sgd(model)
    if refused is not None:
        with pytest.raises(GraphError, match=refused):
            prepared(model, loss, optimizer, batch, 2, WHOLE, DEFERRED)
        return

    graph = prepared(model, loss, optimizer, batch, 2, WHOLE, DEFERRED)
    parts = [{"x": part} for part in batch["x"].chunk(2)]
    outputs, new = run_graph(graph, initial_states(model, optimizer), parts, {"lr": 0.1})

    # Data that do not depend on the batch are normalised whole, in each micro-batch.
    num = 1 if name == "constants" else 2
    (expected,) = paper(model, [batch], loss, optimizer, num, WHOLE)
    torch.testing.assert_close(outputs["loss"], expected)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(new[key], value)


def test_random_numbers_of_all_micro_batches_make_the_statistics() -> None:
    class Model(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.randn(4, 3)) * x

    model = Model(3)
    batch = {"x": torch.randn(16, 3), "toward": torch.randn(16, 3)}

    graph = prepared(model, mean_loss, _sgd(model), batch, 4, MEAN, DEFERRED)

    (variance,) = (one for one in graph.nodes if one.outputs == (graph.new_states["running_var"],))
    unbiased = graph.producers[variance.args[1].name]
    assert unbiased.args[1] == 16 / 15


def test_the_whole_batch_is_refused_with_the_way_out() -> None:
    model, batches = _build("vectors")

    with pytest.raises(GraphError, match=r"all samples \(compile.passes.deferred_batch_norm=true"):
        prepared(model, mean_loss, _sgd(model), batches[0], 2, WHOLE, PassOptions())


def test_a_rank_has_no_more_activations_and_passes_over_them() -> None:
    model, batches = _build("images")
    step = partial(prepared, model, mean_loss, _sgd(model), batches[0], 2)

    plain = step(MEAN, PassOptions())
    kinds = sorted(node.kind for node in plain.nodes if "norm" in node.kind)
    for meaning in (MEAN, WHOLE):
        deferred = step(meaning, DEFERRED)
        assert sorted(node.kind for node in deferred.nodes if "norm" in node.kind) == kinds
        assert not {"cat", "slice"} & {node.kind for node in deferred.nodes}
