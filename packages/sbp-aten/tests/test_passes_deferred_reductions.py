"""Deferred reductions: the same numbers, and fewer bytes between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import prepare_step
from sbp_aten.passes.deferred_reductions import accumulate_addends, defer_reductions, sum_squares
from sbp_core.compile import BoxingActor, compile_plan
from sbp_core.errors import GraphError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Rate, Ref, TensorType
from sbp_core.infer import infer_strategy
from sbp_core.infer.pins import PinValue
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import Builder, cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import (
    PROGRAMS,
    Mlp,
    Program,
    adamw,
    graph_states,
    square_batch,
    square_loss,
)

_LR = {"lr": 1e-2}
_PIPE = Placement.grid((2,), ("pipe",))


class Clipping(torch.optim.SGD):
    """SGD that clips by the global norm inside its step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Scale the gradients to a norm of at most 0.1, then step."""
        (group,) = self.param_groups
        held = [parameter for parameter in group["params"] if parameter.grad is not None]
        total = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(parameter.grad) for parameter in held])
        )
        scale = (0.1 / (total + 1e-6)).clamp(max=1.0)
        for parameter in held:
            parameter.add_(parameter.grad * scale, alpha=-0.1)


def clipping(model: nn.Module) -> torch.optim.Optimizer:
    return Clipping(model.parameters(), lr=1e-2)


def penalised_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean squared error and a penalty on the norm of each parameter."""
    return square_loss(model, batch) + 0.1 * sum(p.norm() for p in model.parameters())


_PROGRAMS = {
    "clipped": Program(model=Mlp, loss=square_loss, batch=square_batch, optimizer=clipping),
    "penalised": Program(model=Mlp, loss=penalised_loss, batch=square_batch, optimizer=adamw),
    "tied gpt": PROGRAMS["tied gpt"],
}


@cache
def _step(name: str) -> LogicalGraph:
    program = _PROGRAMS[name]
    model, optimizer = program.build(torch.float64)
    (batch,) = program.batches(1, 4, torch.float64)
    graph = capture(model, program.loss, batch, optimizer, name=name)
    return prepare_step(graph, options=PassOptions(recompute=None, defer_reductions=False))


def _micro(name: str, count: int) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    (batch,) = _PROGRAMS[name].batches(1, 4 * count, torch.float64)
    parts = [
        {key: value[4 * m : 4 * (m + 1)] for key, value in batch.items()} for m in range(count)
    ]
    return batch, parts


def _run(name: str, graph: LogicalGraph) -> tuple[Tensor, dict[str, object]]:
    states = initial_states(*_PROGRAMS[name].build(torch.float64))
    _, micro = _micro(name, graph.num_micro_batches)
    found, new = run_graph(graph, graph_states(graph, states), micro, _LR)
    return found["loss"], new


def _assert_same(name: str, changed: LogicalGraph, graph: LogicalGraph) -> None:
    (loss, states), (expected, wanted) = _run(name, changed), _run(name, graph)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    for key, value in wanted.items():
        torch.testing.assert_close(states[key], value, rtol=1e-9, atol=1e-11)


def _plan(graph: LogicalGraph, mesh: Placement, pins: Mapping[str, PinValue]):
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(latency_s=1e-9))
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins=pins))
    check(plan)
    return plan


def _assert_trains(name: str, graph: LogicalGraph, mesh: Placement, pins: Mapping[str, PinValue]):
    """Run one step of a plan, compare with one device, and return the plan."""
    plan = _plan(graph, mesh, pins)
    states = initial_states(*_PROGRAMS[name].build(torch.float64))
    batch, _ = _micro(name, graph.num_micro_batches)

    session = ReferenceRuntime(ReferenceConfig()).start(plan, states, None)
    loss = session.step(batch, _LR).loss

    expected, new = _run(name, graph)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for key, value in session.state_dict().items():
        if key in new:
            torch.testing.assert_close(value, new[key], rtol=0, atol=1e-10)
    return plan


# Norms


@pytest.mark.parametrize("name", ["clipped", "penalised"])
def test_norms_become_roots_of_sums_of_squares(name: str) -> None:
    graph = _step(name)

    changed = verify_graph(defer_reductions(graph))

    assert any("norm" in node.kind for node in graph.nodes)
    assert not any("norm" in node.kind for node in changed.nodes)
    _assert_same(name, changed, graph)


def test_a_norm_of_norms_is_one_root() -> None:
    changed = sum_squares(_step("clipped"))

    roots = [node for node in changed.nodes if node.kind == "sqrt"]
    assert len(roots) == 1
    stack = changed.producers[changed.producers[roots[0].args[0].name].args[0].name]
    assert stack.kind == "stack"
    assert all(changed.producers[ref.name].kind == "sum" for ref in stack.args[0])


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_clipping_by_the_global_norm_moves_numbers_instead_of_gradients(num_ranks: int) -> None:
    mesh = Placement.grid((num_ranks,), ("data",))
    graph = _step("clipped")
    changed = sum_squares(graph)

    pins: dict[str, PinValue] = {"batch": "S(0)", "parameters": "S(0)"}

    before = _assert_trains("clipped", graph, mesh, pins)
    after = _assert_trains("clipped", changed, mesh, pins)

    assert after.boxing_bytes < 0.9 * before.boxing_bytes
    in_update = [
        after.steps[actor.step].size_bytes
        for actor in after.ranks[0].actors
        if isinstance(actor, BoxingActor) and actor.phase is Phase.OPTIMIZER
    ]
    assert sum(in_update) <= 64 * num_ranks


@pytest.mark.parametrize(
    ("op", "args", "shape"),
    [
        ("linalg_vector_norm.default", (2, (0,), True), (1, 3)),
        ("linalg_vector_norm.default", (2.0, (-1,)), (2,)),
        ("linalg_vector_norm.default", (), ()),
        ("norm.Scalar", (2,), ()),
        ("norm.ScalarOpt_dim", (2, (0, 1)), ()),
    ],
)
def test_norms_over_any_dims_are_rewritten(
    op: str, args: tuple[object, ...], shape: tuple[int, ...]
) -> None:
    graph = _norm_of_matrix(op, args, shape)

    changed = verify_graph(sum_squares(graph))

    assert not any("norm" in node.kind for node in changed.nodes)
    x = {"x": torch.randn(2, 3)}
    (expected, _), (found, _) = (run_graph(g, {}, [x], {}) for g in (graph, changed))
    assert found["out"].shape == shape
    torch.testing.assert_close(found["out"], expected["out"])


def test_norms_of_narrow_dtypes_are_summed_in_float32() -> None:
    graph = _norm_of_matrix("linalg_vector_norm.default", (), (), "float16")

    changed = verify_graph(sum_squares(graph))

    x = {"x": torch.full((2, 3), 300.0, dtype=torch.float16)}  # whose square is infinite
    (expected, _), (found, _) = (run_graph(g, {}, [x], {}) for g in (graph, changed))
    assert torch.isfinite(found["out"])
    assert torch.equal(found["out"], expected["out"])


@pytest.mark.parametrize("order", [1, float("inf"), 3, True])
def test_other_norms_stay(order: float) -> None:
    graph = _norm_of_matrix("linalg_vector_norm.default", (order,), ())

    assert sum_squares(graph).nodes == graph.nodes


def _norm_of_matrix(
    op: str, args: tuple[object, ...], shape: tuple[int, ...], dtype: str = "float32"
) -> LogicalGraph:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 3), dtype=dtype)
    b.op("n", op, (Ref("x"), *args), shape)
    b.types["n"] = TensorType(shape, dtype)
    b.outputs.append(GraphOutput(name="out", kind=OutputKind.METRIC, value="n"))
    return b.graph()


# Sums over micro-batches


@pytest.mark.slow
def test_addends_of_a_tied_gradient_are_accumulated_apart() -> None:
    graph = accumulate(_step("tied gpt"), 3)

    changed = verify_graph(defer_reductions(graph, ["tokens.weight"]))

    gradients = [n for n in changed.nodes if n.op == "sbp.accumulate" and "part" in n.name]
    assert {node.forward for node in gradients} == {"head.mm", "tokens.embedding"}
    (total,) = [n for n in changed.nodes if n.kind == "add" and n.name.endswith(".mean")]
    assert (total.rate, total.phase) == (Rate.STEP, Phase.BACKWARD)
    _assert_same("tied gpt", changed, graph)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_a_tied_parameter_sends_its_gradient_to_the_other_stage_once_a_step(count: int) -> None:
    graph = accumulate(_step("tied gpt"), count)
    changed = accumulate_addends(graph, ["tokens.weight"])
    size = graph.tensor("tokens.weight").size_bytes

    before = _assert_trains("tied gpt", graph, _PIPE, {})
    after = _assert_trains("tied gpt", changed, _PIPE, {})

    assert before.boxing_bytes - after.boxing_bytes == (count - 1) * size


@pytest.mark.slow
def test_a_tied_parameter_under_pipeline_and_data_parallelism() -> None:
    mesh = Placement.grid((2, 2), ("pipe", "data"))
    pins: dict[str, PinValue] = {"batch": "S(0)", "parameters": "B"}
    graph = accumulate(_step("tied gpt"), 4)

    before = _assert_trains("tied gpt", graph, mesh, pins)
    after = _assert_trains("tied gpt", accumulate_addends(graph, ["*"]), mesh, pins)

    assert after.boxing_bytes < before.boxing_bytes


def test_gradients_of_one_addend_stay() -> None:
    graph = accumulate(_step("tied gpt"), 2)

    changed = accumulate_addends(graph, ["blocks.*"])

    assert [node.name for node in changed.nodes] == [node.name for node in graph.nodes]


def test_without_micro_batches_there_is_nothing_to_accumulate_apart() -> None:
    graph = _step("tied gpt")

    assert accumulate_addends(graph, ["*"]).nodes == graph.nodes


def test_a_pattern_without_parameter_is_refused() -> None:
    with pytest.raises(GraphError, match="'tokes' of gradients matches no parameter") as caught:
        defer_reductions(_step("tied gpt"), ["tokes"])

    assert "tokens.weight" in caught.value.accepted
