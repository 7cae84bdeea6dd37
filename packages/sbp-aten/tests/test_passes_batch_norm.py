from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import prepare_step
from sbp_aten.passes.batch_norm import split_batch_norm
from sbp_core.compile import compile_plan
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import OutputKind
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.runtime.single import run_graph

MODELS = {
    "vectors": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), (3,)),
    "sequences": (lambda: nn.Sequential(nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)), (3, 5)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)),
        (3, 4, 4),
    ),
    "large images": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        (3, 16, 16),
    ),
    "no weights": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4, affine=False)),
        (3, 4, 4),
    ),
    "frozen data": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()), (3, 4, 4)),
}


def _loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    made = model(batch["x"])
    return (made * made.detach().cos()).square().mean()


def _captured(name: str) -> tuple[LogicalGraph, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    parameters = list(model.parameters())
    batch = {"x": torch.randn(8, *shape, dtype=torch.float64)}
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return capture(model, _loss, batch, optimizer), initial_states(model, optimizer), batch


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_compute_what_the_operators_do(name: str) -> None:
    graph, states, batch = _captured(name)

    parted = verify_graph(split_batch_norm(graph))

    backward = [node for node in parted.nodes if "batch_norm_backward" in node.op]
    assert all(node.args[9] == (False, True, True) for node in backward)
    whole, parts = (run_graph(g, states, [batch], {"lr": 0.1}) for g in (graph, parted))
    torch.testing.assert_close(parts[0]["loss"], whole[0]["loss"], rtol=1e-13, atol=1e-13)
    for key, value in whole[1].items():
        torch.testing.assert_close(parts[1][key], value, rtol=1e-12, atol=1e-13)


def test_running_statistics_are_outputs_not_hidden_writes() -> None:
    graph, states, batch = _captured("images")
    before = {key: value.clone() for key, value in states.items()}

    _, new = run_graph(graph, states, [batch], {"lr": 0.1})

    replaced = {out.name for out in graph.outputs if out.kind is OutputKind.STATE}
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= replaced
    assert all(torch.equal(states[key], value) for key, value in before.items())
    assert not torch.equal(new["1.running_mean"], before["1.running_mean"])


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_split_batch_moves_sums_instead_of_activations(num_micro_batches: int) -> None:
    graph, states, batch = _captured("large images")
    moved = {}
    for parted in (False, True):
        options = PassOptions(split_batch_norm=parted)
        step = prepare_step(graph, num_micro_batches, options=options)
        pins = {"batch": "S(0)", "use:batch": "S(0)", "parameters": "B"}
        request = PlanRequest(graph=step, mesh=Placement.grid((4,), ("data",)), cluster=cluster())
        plan = compile_plan(step, infer_strategy(request, planner="test", pins=pins))
        check(plan)
        moved[parted] = plan.boxing_bytes
        session = ReferenceSession(plan, states, ReferenceConfig())
        whole = {"x": torch.cat([batch["x"] + i for i in range(num_micro_batches)])}

        loss = session.step(whole, {"lr": 0.1}).loss

        parts = [{"x": batch["x"] + i} for i in range(num_micro_batches)]
        outputs, new = run_graph(prepare_step(graph, num_micro_batches), states, parts, {"lr": 0.1})
        torch.testing.assert_close(loss, outputs["loss"], rtol=1e-12, atol=1e-12)
        for key, value in session.state_dict().items():
            torch.testing.assert_close(value, new[key], rtol=1e-11, atol=1e-12)

    assert moved[True] < moved[False] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["wide", "as the data"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_parts_are_as_exact_as_the_operators_in_every_dtype_and_layout(
    dtype: torch.dtype, weights: str, layout: torch.memory_format
) -> None:
    torch.manual_seed(0)
    model = nn.BatchNorm2d(4).to(torch.float32 if weights == "wide" else dtype)
    x = (3 * torch.randn(8, 4, 6, 6) + 5).to(dtype).contiguous(memory_format=layout)
    batch = {"x": x, "toward": torch.randn_like(x)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        shifted = batch["x"] * model.scale
        return (model.norm(shifted).float() * batch["toward"]).sum()

    whole = nn.Module()
    whole.norm, whole.scale = model, nn.Parameter(torch.ones(4, 1, 1, dtype=dtype))
    parameters = list(whole.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    graph = capture(whole, loss, batch, optimizer)
    states = initial_states(whole, optimizer)
    wide, exact = whole.double(), {name: value.double() for name, value in batch.items()}

    runs = [run_graph(g, states, [batch], {"lr": 1.0}) for g in (graph, split_batch_norm(graph))]

    loss(wide, exact).backward()
    for name, parameter in wide.named_parameters():
        true = parameter.detach() - parameter.grad
        errors = [float((new[name].double() - true).abs().max()) for _, new in runs]
        assert errors[1] <= 1.5 * errors[0] + 1e-5 * float(true.abs().max()), name


def test_gradients_that_nobody_wants_are_not_made() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)).double()
    model[1].weight.requires_grad_(False)
    batch = {"x": torch.randn(8, 3, 4, 4, dtype=torch.float64)}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    graph, states = capture(model, _loss, batch, optimizer), initial_states(model, optimizer)

    parted = verify_graph(split_batch_norm(graph))

    whole, parts = (run_graph(g, states, [batch], {"lr": 0.1}) for g in (graph, parted))
    for key, value in whole[1].items():
        torch.testing.assert_close(parts[1][key], value, rtol=1e-12, atol=1e-13)


def test_evaluation_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    make, shape = MODELS["images"]
    model = make().eval()
    graph = capture(model, _loss, {"x": torch.randn(8, *shape)})

    assert split_batch_norm(graph) == graph
