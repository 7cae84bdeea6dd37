"""Operator slicing: the same numbers, parameters gathered a part at a time, no more bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.pass_options import PassOptions, Slicing
from sbp_aten.passes import prepare_step, share_expressions
from sbp_aten.passes.operator_slicing import slice_operators
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import Collective
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import Phase, TensorType
from sbp_core.graph_variant import SliceAlong
from sbp_core.infer import infer_strategy
from sbp_core.infer.pins import PinValue, activations
from sbp_core.memory import RankMemory, predict_memory
from sbp_core.passes import accumulate
from sbp_core.passes.recomputation import RecomputeOptions, recompute
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.sbp import NdSbp
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.ops.operators import operator_of
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import (
    PROGRAMS,
    Program,
    adamw,
    graph_states,
    square_batch,
    square_loss,
)
from sbp_torch.testing.signatures import check_rule, sample

_LR = {"lr": 1e-2}
_BOTH = [SliceAlong.OUTPUT, SliceAlong.CONTRACTION]


class Wide(nn.Module):
    """Residual blocks whose parameters are far larger than their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(2)]
        )
        self.head = nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Experts(nn.Module):
    """A batch of matrices, used as they are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 6, 8))
        self.head = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        split = torch.bmm(x.expand(2, *x.shape), self.up)
        return torch.tanh(split).sum(0) @ self.head


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


_PROGRAMS = {
    "wide": Program(model=Wide, loss=square_loss, batch=square_batch, optimizer=plain),
    "experts": Program(model=Experts, loss=square_loss, batch=square_batch, optimizer=adamw),
    "tied gpt": PROGRAMS["tied gpt"],
    "gpt": PROGRAMS["gpt"],
}


@cache
def _step(name: str, size: int = 4) -> LogicalGraph:
    program = _PROGRAMS[name]
    model, optimizer = program.build(torch.float64)
    (batch,) = program.batches(1, size, torch.float64)
    graph = capture(model, program.loss, batch, optimizer, name=name)
    return prepare_step(graph, options=PassOptions(recompute=None, defer_reductions=False))


def _run(name: str, graph: LogicalGraph, size: int = 4) -> tuple[Tensor, dict[str, object]]:
    program = _PROGRAMS[name]
    states = initial_states(*program.build(torch.float64))
    batches = program.batches(1, size, torch.float64)
    found, new = run_graph(graph, graph_states(graph, states), batches, _LR)
    return found["loss"], new


def _assert_same(name: str, changed: LogicalGraph) -> None:
    (loss, states), (expected, wanted) = _run(name, changed), _run(name, _step(name))
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
    for key, value in wanted.items():
        torch.testing.assert_close(states[key], value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("along", _BOTH)
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("wide", "blocks.*"),
        ("gpt", "blocks.*.weight"),
        ("gpt", "head"),
        ("experts", "up"),
        ("experts", "head"),
    ],
)
def test_a_sliced_step_computes_the_same(name: str, pattern: str, along: SliceAlong) -> None:
    changed = verify_graph(slice_operators(_step(name), {pattern: Slicing(count=2, along=along)}))

    assert sum(node.op == "sbp.piece" for node in changed.nodes) >= 4
    _assert_same(name, changed)


def test_an_embedding_is_sliced_by_columns() -> None:
    changed = verify_graph(slice_operators(_step("gpt"), {"tokens": Slicing(count=4)}))

    parts = [n for n in changed.nodes if n.kind in ("embedding", "embedding_dense_backward")]
    shapes = [changed.tensor(node.outputs[0]).shape[-1] for node in parts if "tokens" in node.name]
    assert shapes == [2] * 8
    _assert_same("gpt", changed)


@pytest.mark.slow
def test_all_operators_of_a_tied_parameter_are_sliced() -> None:
    changed = verify_graph(slice_operators(_step("tied gpt"), {"tokens.weight": Slicing(count=2)}))

    kinds = {node.kind for node in changed.users["tokens.weight"] if node.phase is Phase.FORWARD}
    assert kinds == {"piece"}
    _assert_same("tied gpt", changed)


def test_no_operator_between_slices_takes_or_makes_a_whole_parameter() -> None:
    graph = _step("wide")

    changed = slice_operators(graph, {"blocks.*": Slicing(count=4)})

    for name in ("blocks.0.0.weight", "blocks.1.2.weight"):
        whole = graph.tensor(name).size_bytes
        users = [n for n in changed.users[name] if n.phase is not Phase.OPTIMIZER]
        assert users and all(node.op == "sbp.piece" for node in users)
        assert {changed.tensor(node.outputs[0]).size_bytes for node in users} == {whole // 4}
        products = [n for n in changed.nodes if n.module == name[: -len(".weight")]]
        made = [n for n in products if n.kind == "mm" and n.phase is Phase.BACKWARD]
        assert sum(changed.tensor(n.outputs[0]).size_bytes == whole // 4 for n in made) == 4


def test_each_slice_waits_for_the_one_before() -> None:
    changed = slice_operators(_step("wide"), {"blocks.0.0": Slicing(count=2)})

    second = changed.by_name["blocks.0.0.weight/1"]
    assert second.args[1].name == "blocks.0.0.addmm/0"
    settled = [n for n in changed.nodes if n.op == "sbp.piece" and n.args[5]]
    # Of the gradient, the second part waits until the first has been reduced.
    assert [n.args[1].name for n in settled][1] == "blocks.0.0.grad.mm_1/0"


def test_later_patterns_override_earlier_ones() -> None:
    changed = slice_operators(
        _step("wide"), {"blocks.*": Slicing(count=2), "blocks.1.*": Slicing(count=4)}
    )

    counts = {n.name: n.args[4] for n in changed.nodes if n.op == "sbp.piece"}
    assert counts["blocks.0.0.weight/0"] == 2
    assert counts["blocks.1.0.weight/0"] == 4


@pytest.mark.parametrize(
    ("slices", "what"),
    [
        ({"bloks": Slicing(count=2)}, "'bloks' of slices matches no parameter"),
        ({"first.bias": Slicing(count=2)}, "'first.bias' of slices matches no parameter"),
        ({"blocks.*": Slicing(count=3)}, "128 elements are not 3 equal slices"),
    ],
)
def test_what_cannot_be_sliced_is_refused(slices: Mapping[str, Slicing], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        slice_operators(_step("wide"), slices)


def test_what_can_only_be_cut_the_other_way_is_cut_that_way() -> None:
    changed = verify_graph(slice_operators(_step("wide"), {"first": Slicing(count=4)}))
    other = verify_graph(
        slice_operators(_step("wide"), {"first": Slicing(count=4, along=SliceAlong.CONTRACTION)})
    )

    # Of (32, 6) only the rows are four equal parts, and they are columns of the output.
    for graph in (changed, other):
        (first,) = [n for n in graph.users["first.weight"] if n.name == "first.weight/0"]
        assert first.args[2] == 0
        _assert_same("wide", graph)


def test_rows_of_an_embedding_are_not_sliced() -> None:
    slices = {"tokens": Slicing(count=2, along=SliceAlong.CONTRACTION)}

    with pytest.raises(ConfigError, match="rows of an embedding") as caught:
        slice_operators(_step("gpt"), slices)

    assert caught.value.accepted == "along='output'"


def test_one_slice_is_refused() -> None:
    with pytest.raises(SbpValueError, match="1 slices"):
        Slicing(count=1)


def test_sharing_expressions_does_not_undo_slices() -> None:
    changed = slice_operators(_step("tied gpt"), {"tokens.weight": Slicing(count=2)})

    shared = share_expressions(changed)

    pieces = [[n for n in g.nodes if n.op == "sbp.piece"] for g in (changed, shared)]
    assert len(pieces[0]) == len(pieces[1])


def test_slices_may_be_made_again() -> None:
    sliced = slice_operators(_step("wide"), {"blocks.*": Slicing(count=2)})

    changed = verify_graph(recompute(sliced, RecomputeOptions(modules=("blocks.*",))))

    assert any(n.op == "sbp.piece" and "recomputed" in n.tags for n in changed.nodes)
    _assert_same("wide", changed)


@pytest.mark.parametrize("settled", [False, True])
def test_a_piece_is_the_same_however_its_arguments_lie(settled: bool) -> None:
    def execute(op: str, args: list[object], kwargs: Mapping[str, object]) -> object:
        return operator_of(op)(*args, **kwargs)

    x, token = torch.randn(12, 8).double(), torch.randn(5, 3).double()

    reports = check_rule(
        "sbp.piece",
        [sample(x, token, 0, 1, 2, settled), sample(x, token, 1, 3, 4, settled)],
        execute=execute,
    )

    claimed = {str(claim.signature) for report in reports for claim in report.claimed}
    assert {"(S(0)) (S(1)) -> (S(0))", "(S(1)) (S(0)) -> (S(1))"} <= claimed
    assert ("(S(0)) (P) -> (S(0))" in claimed) is not settled


# Plans


@dataclass(frozen=True, kw_only=True)
class _Measured:
    plan: PhysicalPlan
    memory: RankMemory
    gathered_bytes: int
    reduced_bytes: int


_STORED: dict[str, PinValue] = {
    "batch": "S(0)",
    "parameters": "S(0)",
    "*.bias": "B",
    "activations": "S(0)",
}


def _measured(
    graph: LogicalGraph,
    num_ranks: int,
    pins: Mapping[str, PinValue] = MappingProxyType({}),
    options: CompileOptions | None = None,
) -> _Measured:
    mesh = Placement.grid((num_ranks,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())
    strategy = infer_strategy(request, planner="test", pins={**_STORED, **pins})
    plan = compile_plan(graph, strategy, options)
    kinds: dict[str, int] = {"all-gather": 0, "reduce-scatter": 0}
    for actor in plan.ranks[0].actors:
        if isinstance(actor, Collective):
            step = plan.steps[actor.step]
            whole = TensorType(step.shape, step.dtype).size_bytes
            kinds[step.kind.value] = max(kinds.get(step.kind.value, 0), whole)
    return _Measured(
        plan=plan,
        memory=predict_memory(plan).ranks[0],
        gathered_bytes=kinds["all-gather"],
        reduced_bytes=kinds["reduce-scatter"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("along", _BOTH)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_sliced_parameter_is_gathered_and_reduced_part_by_part(
    num_ranks: int, along: SliceAlong
) -> None:
    graph = _step("wide", 64)
    whole = graph.tensor("blocks.0.0.weight").size_bytes
    unsliced = _measured(graph, num_ranks)
    wire = {unsliced.plan.boxing_bytes}
    peaks = []

    for count in (2, 4, 8):
        changed = slice_operators(graph, {"blocks.*": Slicing(count=count, along=along)})
        found = _measured(changed, num_ranks)

        assert found.gathered_bytes == found.reduced_bytes == whole // count
        wire.add(found.plan.boxing_bytes)
        peaks.append(found.memory.peak)
    assert len(wire) == 1
    # Exactly counted, 4 slices of a contraction need more than 2, though less than none.
    assert max(peaks) < unsliced.memory.peak
    if along is SliceAlong.OUTPUT:
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_slices_move_the_bytes_of_the_whole_and_need_less_memory(num_ranks: int) -> None:
    graph = _step("wide", 64)
    weights = [f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in (0, 2)]
    sizes = [graph.tensor(name).size_bytes for name in weights]
    whole = _measured(graph, num_ranks)

    changed = slice_operators(graph, {"blocks.*": Slicing(count=8)})
    found = _measured(changed, num_ranks)

    moved = sum(
        found.plan.steps[actor.step].size_bytes
        for actor in found.plan.ranks[0].actors
        if isinstance(actor, Collective)
        and (".weight" in actor.name or ".grad.mm_1" in actor.name)
        and actor.name.startswith("blocks.")
    )
    # Gathered for the forward phase, gathered again for the backward phase, gradients reduced.
    assert moved == 3 * (num_ranks - 1) * sum(sizes)
    assert found.memory.resting == whole.memory.resting
    assert whole.memory.peak - found.memory.peak > max(sizes)


def test_a_pin_of_how_a_parameter_is_used_holds_for_its_slices() -> None:
    graph = _step("wide", 64)
    changed = slice_operators(graph, {"blocks.*": Slicing(count=4)})

    # Each parameter by itself, so that its own bytes are seen.
    alone = CompileOptions(bucket_bytes=0)
    found = _measured(changed, 2, {"use:blocks.*.weight": "B"}, alone)

    assert found.gathered_bytes == graph.tensor("blocks.0.0.weight").size_bytes


def test_a_parameter_of_two_users_is_not_gathered_whole_for_both() -> None:
    graph = slice_operators(_step("tied gpt"), {"tokens.weight": Slicing(count=2)})
    mesh = Placement.grid((2,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())

    strategy = infer_strategy(request, planner="test", pins=_STORED)

    pieces = [n for n in graph.users["tokens.weight"] if n.op == "sbp.piece"]
    taken = {strategy.nodes[node.name].signature.inputs[0] for node in pieces}
    assert taken == {strategy.storage["tokens.weight"].sbp} == {NdSbp.parse("S(0)")}


def test_slices_are_no_activations_though_they_wait_for_some() -> None:
    changed = slice_operators(_step("wide", 32), {"blocks.0.0": Slicing(count=4)})
    slices = [n.outputs[0] for n in changed.nodes if n.op == "sbp.piece" and n.num_slices == 4]
    assert changed.tensor(slices[0]).shape[0] == 32  # as many as there are samples

    assert not set(activations(changed)).intersection(slices)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("along", _BOTH)
@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        (Placement.grid((1,), ("data",)), 1),
        (Placement.grid((2,), ("data",)), 2),
        (Placement.grid((3,), ("data",)), 1),
        (Placement.grid((4,), ("data",)), 1),
        (Placement.grid((2,), ("pipe",)), 2),
        (Placement.grid((2, 2), ("pipe", "data")), 2),
    ],
)
def test_plans_of_sliced_steps_train_as_one_device(
    mesh: Placement, count: int, along: SliceAlong
) -> None:
    program = _PROGRAMS["wide"]
    graph = accumulate(_step("wide", 8), count)
    slices = {"blocks.*": Slicing(count=4, along=along), "first": Slicing(count=2, along=along)}
    changed = accumulate(slice_operators(_step("wide", 8), slices), count)
    request = PlanRequest(graph=changed, mesh=mesh, cluster=cluster())
    strategy = infer_strategy(request, planner="test", pins=_STORED)
    plan = compile_plan(changed, strategy)
    check(plan)
    states = initial_states(*program.build(torch.float64))
    (batch,) = program.batches(1, 8 * count, torch.float64)
    micro = [
        {name: value[8 * m : 8 * (m + 1)] for name, value in batch.items()} for m in range(count)
    ]

    session = ReferenceRuntime(ReferenceConfig()).start(plan, states, None)
    loss = session.step(batch, _LR).loss

    expected, new = run_graph(graph, graph_states(graph, states), micro, _LR)
    torch.testing.assert_close(loss, expected["loss"], rtol=0, atol=1e-12)
    for name, value in session.state_dict().items():
        torch.testing.assert_close(value, new[name], rtol=0, atol=1e-12)
