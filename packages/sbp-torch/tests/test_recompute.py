"""Recomputation: less is kept, nothing else changes; on one device and under plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import fold_views, prepare_step, share_expressions
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.infer import infer_strategy
from sbp_core.infer.pins import PinValue
from sbp_core.memory import MemoryKind, RankMemory, predict_memory
from sbp_core.passes import accumulate, least_recompute_budget
from sbp_core.passes.closure import least_closure
from sbp_core.passes.recomputation import RecomputeOptions, recompute, recompute_report
from sbp_core.passes.saved_activations import saved_bytes, saved_values
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import Builder, cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import (
    PROGRAMS,
    VOCABULARY,
    Block,
    Program,
    adamw,
    graph_states,
    same_states,
    square_batch,
    square_loss,
    token_batch,
    token_loss,
)
from sbp_torch.testing.signatures import check_rule, sample

_SCALARS = {"lr": 1e-2, "seed": 5, "step": 2}
_NUM_BLOCKS = 6
_ALL = RecomputeOptions(modules=("blocks.*",))


class Deep(nn.Module):
    """A GPT of six blocks, without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(_NUM_BLOCKS)])
        self.head = nn.Linear(8, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Noisy(nn.Module):
    """Blocks with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.GELU())
                for _ in range(2)
            ]
        )
        self.head = nn.Linear(6, 4)

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.block(block, x)
        return self.head(x)


class Stateless(Noisy):
    """The same without running statistics."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[1] = nn.BatchNorm1d(6, track_running_stats=False)


class Marked(Stateless):
    """The same with each block under `torch.utils.checkpoint`."""

    def block(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


_PROGRAMS = {
    "deep": Program(model=Deep, loss=token_loss, batch=token_batch, optimizer=adamw),
    "noisy": Program(model=Noisy, loss=square_loss, batch=square_batch, optimizer=adamw),
    "stateless": Program(model=Stateless, loss=square_loss, batch=square_batch, optimizer=adamw),
    "marked": Program(model=Marked, loss=square_loss, batch=square_batch, optimizer=adamw),
    "tied gpt": PROGRAMS["tied gpt"],
}


@cache
def _step(name: str, size: int = 4) -> LogicalGraph:
    program = _PROGRAMS[name]
    model, optimizer = program.build(torch.float64)
    (batch,) = program.batches(1, size, torch.float64)
    graph = capture(model, program.loss, batch, optimizer, name=name)
    return prepare_step(graph, options=PassOptions(recompute=None, defer_reductions=False))


def _recomputed(graph: LogicalGraph) -> list[str]:
    return [
        node.forward for node in graph.nodes if "recomputed" in node.tags and node.op != "sbp.after"
    ]


def _run(name: str, graph: LogicalGraph) -> tuple[Tensor, dict[str, object]]:
    program = _PROGRAMS[name]
    states = initial_states(*program.build(torch.float64))
    found, new = run_graph(
        graph, graph_states(graph, states), program.batches(1, 4, torch.float64), _SCALARS
    )
    return found["loss"], new


_HOW = {
    "all blocks": _ALL,
    "activations only": RecomputeOptions(modules=("blocks.*",), keep=("*mm*", "*attention*")),
    "a budget": RecomputeOptions(memory_bytes=80_000),
    "a small budget over runs": RecomputeOptions(memory_bytes=50_000, longest_run=4),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("how", _HOW)
def test_a_recomputed_step_is_the_step_itself_bit_for_bit(how: str) -> None:
    graph = _step("deep")

    changed = verify_graph(recompute(graph, _HOW[how]))

    assert saved_bytes(changed) < saved_bytes(graph)
    (loss, states), (expected, wanted) = _run("deep", changed), _run("deep", graph)
    assert torch.equal(loss, expected)
    assert same_states(states, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noisy", "marked", "tied gpt"])
def test_dropout_and_batch_norm_are_the_same_when_made_again(name: str) -> None:
    graph = _step(name)

    changed = verify_graph(recompute(graph, RecomputeOptions() if name == "marked" else _ALL))

    assert _recomputed(changed)
    (loss, states), (expected, wanted) = _run(name, changed), _run(name, graph)
    assert torch.equal(loss, expected)
    assert same_states(states, wanted)


def test_random_numbers_are_drawn_again_from_the_same_place() -> None:
    changed = recompute(_step("noisy"), _ALL)

    drawn = [node.args for node in changed.nodes if node.op.startswith("sbp.random_bernoulli")]
    assert len(drawn) == 4
    assert set(drawn[:2]) == set(drawn[2:])


@pytest.mark.slow
def test_what_the_user_marked_is_made_again_call_by_call() -> None:
    by_mark = recompute(_step("marked"), RecomputeOptions())
    by_name = recompute(_step("stateless"), _ALL)

    assert _recomputed(by_mark) == _recomputed(by_name) != []
    assert _recomputed(recompute(_step("marked"), RecomputeOptions(marked=False))) == []


def test_of_a_recomputed_block_only_what_comes_into_it_is_kept() -> None:
    graph = _step("deep")

    changed = recompute(graph, _ALL)

    within = [v for v in saved_values(changed) if graph.producers[v].module.startswith("blocks.")]
    outputs = [
        [node.outputs[0] for node in graph.nodes if node.module == f"blocks.{index}"]
        for index in range(_NUM_BLOCKS)
    ]
    # The last node of a block is the sum that goes into the next one, or into the head.
    last = [[v for v in made if graph.producers[v].phase is Phase.FORWARD][-1] for made in outputs]
    assert set(within) == set(last)


def test_what_others_use_of_a_block_in_their_backward_is_kept_for_them() -> None:
    graph = _step("tied gpt")  # whose last norm looks at what the last block made

    changed = recompute(graph, _ALL)

    (norm,) = [n for n in graph.nodes if n.module == "norm" and n.kind == "native_layer_norm"]
    last = norm.args[0].name
    assert graph.producers[last].module == "blocks.1"
    assert last in saved_values(changed)
    assert last not in _recomputed(changed)


def test_a_block_is_made_again_after_the_backward_of_the_block_behind_it() -> None:
    changed = recompute(_step("deep"), _ALL)

    place = {node.name: index for index, node in enumerate(changed.nodes)}
    spans = []
    for index in range(_NUM_BLOCKS):
        inside = [
            node
            for node in changed.nodes
            if node.phase is Phase.BACKWARD and node.module.startswith(f"blocks.{index}")
        ]
        first = min(place[node.name] for node in inside if "recomputed" in node.tags)
        # Behind it: no backward node of the block that uses what is made again comes earlier.
        assert all(
            place[node.name] > first
            for node in inside
            if any(value.endswith(".recomputed") for value in node.inputs())
        )
        spans.append(first)
    assert spans == sorted(spans, reverse=True)
    for index in range(_NUM_BLOCKS - 1):
        behind = [n for n in changed.nodes if n.module.startswith(f"blocks.{index + 1}.")]
        used = [n for n in behind if any(value.endswith(".recomputed") for value in n.inputs())]
        assert max(place[n.name] for n in used) < spans[index]


def test_what_is_made_again_waits_for_the_gradient_of_its_block() -> None:
    changed = recompute(_step("deep"), _ALL)

    gates = [node for node in changed.nodes if node.op == "sbp.after"]
    assert len(gates) >= _NUM_BLOCKS
    for node in gates:
        token = changed.producers[node.args[1].name]
        assert token.phase is Phase.BACKWARD
        assert "recomputed" not in token.tags


def test_sharing_expressions_does_not_undo_a_recomputation() -> None:
    changed = recompute(_step("deep"), _ALL)

    assert _recomputed(share_expressions(fold_views(changed))) == _recomputed(changed)


def test_what_is_kept_by_pattern_is_not_made_again() -> None:
    graph = _step("deep")

    changed = recompute(graph, RecomputeOptions(modules=("blocks.*",), keep=("*.attention.out",)))

    assert not any(graph.by_name[name].module.endswith(".out") for name in _recomputed(changed))
    assert any(v.startswith("blocks.1.attention.out") for v in saved_values(changed))


def test_what_draws_from_torchs_own_stream_is_not_drawn_twice() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("m.y", "mm.default", (Ref("x"), Ref("w")), (4, 4), module="m")
    b.op("m.noise", "rand_like.default", (Ref("m.y"),), (4, 4), module="m")
    b.op("m.z", "mul.Tensor", (Ref("m.y"), Ref("m.noise")), (4, 4), module="m", pointwise=True)
    b.op("loss", "sum.default", (Ref("m.z"),), ())
    back = {"phase": Phase.BACKWARD, "forward": "m.z", "pointwise": True}
    b.op("grad", "mul.Tensor", (Ref("m.noise"), Ref("m.y")), (4, 4), **back)
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="grad"))
    b.nodes[1] = type(b.nodes[1])(**{**_fields(b.nodes[1]), "tags": ("seeded",)})

    changed = verify_graph(recompute(b.graph(), RecomputeOptions(modules=("m",))))

    assert _recomputed(changed) == ["m.y"]


def _fields(node: object) -> dict[str, object]:
    return {name: getattr(node, name) for name in node.__dataclass_fields__}


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bloks' of the recomputation matches no") as error:
        recompute(_step("deep"), RecomputeOptions(modules=("bloks",)))

    assert "blocks.0" in error.value.accepted


@pytest.mark.parametrize("wrong", [{"longest_run": 0}, {"memory_bytes": -1}])
def test_numbers_out_of_range_are_refused(wrong: Mapping[str, int]) -> None:
    with pytest.raises(SbpValueError, match="longest_run"):
        RecomputeOptions(**wrong)


# Budgets


@pytest.mark.slow
def test_a_budget_is_kept_and_costs_no_more_work_than_it_must() -> None:
    graph = _step("deep")
    whole = recompute_report(recompute(graph, _ALL))
    work = []

    before = whole.saved_before_bytes
    for budget in (2 * before, before, *(before * part // 10 for part in (8, 6, 4))):
        report = recompute_report(recompute(graph, RecomputeOptions(memory_bytes=budget)))

        assert report.saved_after_bytes + report.largest_recomputed_bytes <= budget
        work.append(report.extra_flop)
    assert work[0] == 0
    assert work == sorted(work)
    assert work[2] < 0.1 * whole.extra_flop  # what is cheap to make goes first
    assert work[-1] <= whole.extra_flop


def test_a_budget_that_nothing_fits_says_what_would() -> None:
    with pytest.raises(ConfigError, match="do not fit in 100 B") as caught:
        recompute(_step("deep"), RecomputeOptions(memory_bytes=100))

    least = int(caught.value.accepted.split(">= ")[1].split()[0])
    assert least == least_recompute_budget(_step("deep"))
    graph = recompute(_step("deep"), RecomputeOptions(memory_bytes=least))
    assert least == least_recompute_budget(graph)  # what is recomputed already can be kept, too
    report = recompute_report(graph)
    assert report.saved_after_bytes + report.largest_recomputed_bytes <= least


@pytest.mark.slow
def test_the_least_budget_is_enough_where_sizes_have_no_common_unit() -> None:
    """Bytes are counted in units, rounded up: beside the least budget nothing seemed to fit."""
    widths = (1201, 1213, 1217, 1223, 1229, 1231)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(w, w + 1), nn.GELU(), nn.Linear(w + 1, n))
                            for w, n in pairwise(widths)))  # fmt: skip
    x = torch.zeros(1, widths[0])
    graph = capture(model, lambda model, x: model(x).square().mean(), x, adamw(model))
    least = least_recompute_budget(graph)

    report = recompute_report(recompute(graph, RecomputeOptions(memory_bytes=least)))

    assert report.saved_after_bytes + report.largest_recomputed_bytes <= least
    with pytest.raises(ConfigError, match="do not fit"):
        recompute(graph, RecomputeOptions(memory_bytes=least - 1))


@pytest.mark.slow
def test_blocks_made_again_in_one_go_keep_less() -> None:
    graph = _step("deep")
    short, long = (
        recompute_report(recompute(graph, RecomputeOptions(memory_bytes=200_000, longest_run=n)))
        for n in (1, _NUM_BLOCKS)
    )
    assert short.extra_flop == long.extra_flop == 0  # it fits as it is

    with pytest.raises(ConfigError) as one:
        recompute(graph, RecomputeOptions(memory_bytes=0))
    with pytest.raises(ConfigError) as many:
        recompute(graph, RecomputeOptions(memory_bytes=0, longest_run=_NUM_BLOCKS))

    least = [int(e.value.accepted.split(">= ")[1].split()[0]) for e in (one, many)]
    assert least[1] <= least[0]


def test_the_report_says_what_is_kept_and_what_it_costs() -> None:
    graph = _step("deep")

    report = recompute_report(recompute(graph, _ALL))

    assert report.saved_before_bytes == saved_bytes(graph)
    assert [module for module, _ in report.modules] == [
        f"blocks.{i}" for i in reversed(range(_NUM_BLOCKS))
    ]
    assert 0 < report.extra_flop < report.step_flop
    assert f"more work: blocks.{{0-{_NUM_BLOCKS - 1}}} (" in str(report)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(-9, 9), min_size=1, max_size=7),
    edges=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12),
    required=st.sets(st.integers(0, 6), max_size=2),
)
def test_the_least_closed_set_is_that_of_an_exhaustive_search(
    weights: list[int], edges: list[tuple[int, int]], required: set[int]
) -> None:
    count = len(weights)
    asks = {x: [y for a, y in edges if a == x and y < count] for x in range(count)}
    required = {x for x in required if x < count}

    found = least_closure(dict(enumerate(weights)), asks, required)

    closed = [
        {x for x in range(count) if bits[x]}
        for bits in product((False, True), repeat=count)
        if all(bits[y] for x in range(count) if bits[x] for y in asks[x])
        and all(bits[x] for x in required)
    ]
    least = min(sum(weights[x] for x in taken) for taken in closed)
    assert set(found) in closed
    assert sum(weights[x] for x in found) == least


# Plans


@dataclass(frozen=True, kw_only=True)
class _Case:
    mesh: Placement
    pins: Mapping[str, PinValue]
    num_micro_batches: int = 1


_TENSOR = {
    "blocks.*.attention.qkv.weight": "S(0)",
    "blocks.*.attention.out.weight": "S(1)",
    "blocks.*.up.weight": "S(0)",
    "blocks.*.down.weight": "S(1)",
}
_CASES = {
    "one rank": _Case(mesh=Placement.grid((1,), ("data",)), pins={}),
    "data": _Case(mesh=Placement.grid((2,), ("data",)), pins={"batch": "S(0)", "parameters": "B"}),
    "sharded states": _Case(
        mesh=Placement.grid((4,), ("data",)),
        pins={"batch": "S(0)", "parameters": "S(0)", "optimizer_states": "S(0)"},
    ),
    "tensor": _Case(mesh=Placement.grid((2,), ("tensor",)), pins={"batch": "B", **_TENSOR}),
    "pipeline": _Case(mesh=Placement.grid((2,), ("pipe",)), pins={}, num_micro_batches=3),
}


def _activation_bytes(memory: RankMemory) -> int:
    """Return what is alive at the peak beside the states and the batch."""
    return memory.peak - memory.resting - memory.kinds.get(MemoryKind.BATCH, 0)


@pytest.mark.slow
@pytest.mark.parametrize("case", _CASES)
def test_plans_of_a_recomputed_step_need_less_memory_and_train_the_same(case: str) -> None:
    chosen, program = _CASES[case], _PROGRAMS["deep"]
    count = chosen.num_micro_batches
    graph = accumulate(_step("deep", 16), count)
    changed = accumulate(recompute(_step("deep", 16), _ALL), count)
    plans = []
    for step in (graph, changed):
        request = PlanRequest(graph=step, mesh=chosen.mesh, cluster=cluster())
        strategy = infer_strategy(request, planner="test", pins=chosen.pins)
        plans.append(compile_plan(step, strategy, CompileOptions(boxing_thread=True)))
    states = initial_states(*program.build(torch.float64))
    (batch,) = program.batches(1, 16 * count, torch.float64)
    micro = [
        {name: value[16 * m : 16 * (m + 1)] for name, value in batch.items()} for m in range(count)
    ]

    before, after = (predict_memory(plan).ranks for plan in plans)
    session = ReferenceRuntime(ReferenceConfig()).start(plans[1], states, None)
    loss = session.step(batch, _SCALARS).loss

    # The last stage spares little: the gradients of its weights are computed after what the stage
    # before waits for has been sent, and their operands, computed again, live until then.
    needed, kept = (
        [_activation_bytes(rank) for rank in ranks.values()] for ranks in (after, before)
    )
    assert all(less < more for less, more in zip(needed, kept, strict=True))
    assert max(needed) < 0.75 * max(kept)
    expected, new = run_graph(graph, graph_states(graph, states), micro, _SCALARS)
    torch.testing.assert_close(loss, expected["loss"], rtol=0, atol=1e-12)
    for name, value in session.state_dict().items():
        if name in new:
            torch.testing.assert_close(value, new[name], rtol=0, atol=1e-9)


@pytest.mark.slow
def test_waiting_changes_nothing_however_the_two_arguments_lie() -> None:
    def first(_op: str, args: list[Tensor], _kwargs: object) -> Tensor:
        return args[0]

    x, token = torch.randn(4, 5, 2).double(), torch.randn(20, 3).double()

    reports = check_rule(
        "sbp.after", [sample(x, token), sample(x, x.clone()), sample(x[0], token)], execute=first
    )

    claimed = {str(claim.signature) for report in reports for claim in report.claimed}
    assert {"(S(0)) (S(0)) -> (S(0))", "(S(1)) (P) -> (S(1))", "(P) (B) -> (P)"} <= claimed
