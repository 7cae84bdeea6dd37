from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
import torch

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import Collective
from sbp_core.compile.cuts import _pieces
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import SbpValueError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import cluster, mlp
from sbp_core.testing.plans import LINE, strategy_of
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession

_DATA = {
    "batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}
_ZERO_3 = {**_DATA, **dict.fromkeys(("parameters", "optimizer_states", "gradients"), "S(0)")} | {
    "updates": "S(0)",
    "use:parameters": "B",
}


_ZERO_1 = {**_DATA, **dict.fromkeys(("optimizer_states", "gradients", "updates"), "S(0)")}
_ZERO_2 = {**_ZERO_1, "micro_gradients": "S(0)"}


def _strategy(graph: LogicalGraph, pins: dict[str, object], mesh: Placement = LINE) -> Strategy:
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    return infer_strategy(request, planner="test", pins=pins)


def _plan(graph: LogicalGraph, strategy: Strategy, **options: object) -> PhysicalPlan:
    plan = compile_plan(graph, strategy, CompileOptions(boxing_thread=True, **options))
    check(plan)
    return plan


def _order(plan: PhysicalPlan, thread: str, rank: int = 0) -> list[str]:
    return [name for name, index in plan.by_rank[rank].orders[thread] if index == 0]


def _nodes(plan: PhysicalPlan, actor: str) -> list[str]:
    return [entry.node for entry in plan.ranks[0].by_name[actor].instructions]


def _run(graph: LogicalGraph, plan: PhysicalPlan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = {
        entry.name: torch.rand(graph.tensor(entry.name).shape, generator=generator)
        for entry in graph.inputs
        if entry.kind.is_state
    }
    session = ReferenceSession(plan, states, ReferenceConfig())
    rows, columns = graph.tensor("x").shape
    batch = torch.rand(rows * graph.num_micro_batches, columns, generator=generator)
    session.step({"x": batch}, {})
    return session.state_dict()


def test_the_backward_pass_is_cut_where_a_gradient_is_ready() -> None:
    graph = mlp((4, 8, 8, 4), batch=64)
    strategy = _strategy(graph, _DATA)

    plan = _plan(graph, strategy, bucket_bytes=0, piece_s=0.0)

    compute = [name for name in _order(plan, "compute") if name.startswith("backward")]
    assert compute == ["backward.0.1", "backward.0.1.1", "backward.0.1.2"]
    assert "layers.2.grad.mm" in _nodes(plan, "backward.0.1")
    assert _nodes(plan, "backward.0.1.2")[-1] == "layers.0.grad.mm"
    reductions = [n for n in _order(plan, "boxing") if "grad" in n]
    assert [n.split(".grad")[0] for n in reductions] == ["layers.2", "layers.1", "layers.0"]


def test_updates_come_as_their_gradients_arrive() -> None:
    graph = mlp((4, 8, 8, 4), batch=64)
    plan = _plan(graph, _strategy(graph, _DATA), bucket_bytes=0, piece_s=0.0)

    updates = [name for name in _order(plan, "compute") if name.startswith("optimizer")]
    first = [_nodes(plan, name)[0].split(".weight")[0] for name in updates]
    assert first == ["layers.2", "layers.1", "layers.0"]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("bucket_bytes", [0, 300, None])
@pytest.mark.parametrize("pins", [_DATA, _ZERO_3], ids=["data", "ZeRO-3"])
def test_cuts_change_no_bit(
    pins: dict[str, object], bucket_bytes: int | None, num_micro_batches: int
) -> None:
    graph = mlp((4, 8, 8, 8, 4), num_micro_batches=num_micro_batches)
    strategy = _strategy(graph, pins)
    options = {"bucket_bytes": bucket_bytes}

    pieces = _plan(graph, strategy, piece_s=0.0, **options)
    whole = _plan(graph, strategy, piece_s=inf, **options)

    # What is gathered on use has cut ZeRO's segments already.
    num_actors = [len(plan.ranks[0].actors) for plan in (pieces, whole)]
    assert num_actors[0] >= num_actors[1]
    found, wanted = _run(graph, pieces), _run(graph, whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_short_pieces_are_left_together() -> None:
    graph = mlp((4, 8, 8, 4), batch=64)
    strategy = _strategy(graph, _DATA)

    plan = _plan(graph, strategy, bucket_bytes=0, piece_s=1.0)

    assert [n for n in _order(plan, "compute") if n.startswith("backward")] == ["backward.0.1"]


def test_one_thread_scatters_a_gradient_before_the_next_is_made() -> None:
    graph = mlp((4, 8, 8, 4), batch=64)
    options = CompileOptions(bucket_bytes=0, piece_s=0.0)
    plan = compile_plan(graph, _strategy(graph, _ZERO_1), options)

    order = [
        n.split(".grad")[0] for n in _order(plan, "compute") if "backward.0.1" in n or "grad" in n
    ]
    assert order == [
        *("backward.0.1", "layers.2"),
        *("backward.0.1.1", "layers.1"),
        *("backward.0.1.2", "layers.0"),
    ]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("pins", [_ZERO_1, _ZERO_2], ids=["ZeRO-1", "ZeRO-2"])
def test_cuts_of_one_thread_change_no_bit(pins: dict[str, object], num_micro_batches: int) -> None:
    graph = mlp((4, 8, 8, 8, 4), num_micro_batches=num_micro_batches)
    strategy = _strategy(graph, pins)

    options = [CompileOptions(bucket_bytes=300, piece_s=piece_s) for piece_s in (0.0, inf)]
    pieces, whole = (compile_plan(graph, strategy, one) for one in options)

    check(pieces)
    assert len(pieces.ranks[0].actors) > len(whole.ranks[0].actors)
    found, wanted = _run(graph, pieces), _run(graph, whole)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_one_thread_needs_no_cuts_for_whole_gradients() -> None:
    graph = mlp((4, 8, 8, 4), batch=64)
    options = CompileOptions(bucket_bytes=0, piece_s=0.0)
    plan = compile_plan(graph, _strategy(graph, _DATA), options)

    compute = [n for n in _order(plan, "compute") if n.startswith("backward.")]
    assert compute == ["backward.0.1"]


def test_pieces_end_where_turns_change_and_both_sides_are_long_enough() -> None:
    assert _pieces([0, 0, 1, 1, 2], [1.0] * 5, 2.0) == [0, 0, 1, 1, 1]
    assert _pieces([0, 0, 1, 1, 2], [1.0] * 5, 0.5) == [0, 0, 1, 1, 2]
    assert _pieces([0, 1, 2], [1.0] * 3, inf) == [0, 0, 0]
    assert _pieces([], [], 0.0) == []


def _gathers_before(plan: PhysicalPlan, segment: str) -> int:
    """Return how many gathers need no more than what is done before a segment ends."""
    part = plan.ranks[0]
    tokens = {r.consumers[0]: r.producer for r in part.registers if not r.keys}
    line = [n for n in _order(plan, "compute") if n.startswith(("forward", "backward"))]
    done = set(line[: line.index(segment)])
    gathers = [a.name for a in part.actors if isinstance(a, Collective) and a.reads]
    return sum(name not in tokens or tokens[name] in done for name in gathers)


@pytest.mark.slow
def test_parameters_are_gathered_as_far_ahead_as_configured() -> None:
    graph = mlp((4, 8, 8, 8, 8, 4))
    strategy = _strategy(graph, _ZERO_3)
    plans = [_plan(graph, strategy, prefetch=ahead) for ahead in (0, 1, 2)]

    line = [n for n in _order(plans[0], "compute") if n.startswith(("forward", "backward"))]
    counts = [[_gathers_before(plan, name) for name in line] for plan in plans]

    assert all(a <= b <= c for a, b, c in zip(*counts, strict=True))
    assert counts[0][0] < counts[1][0] < counts[2][0]
    assert counts[0][-1] == counts[2][-1]


@pytest.mark.parametrize("options", [{"piece_s": -1.0}, {"prefetch": -1}])
def test_negative_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SbpValueError, match="-1"):
        CompileOptions(**options)


@pytest.mark.slow
def test_a_strategy_says_which_parameters_are_gathered_again() -> None:
    graph = mlp((4, 8, 8, 4), batch=64)
    strategy = _strategy(graph, _ZERO_3)

    def gathered(*patterns: str) -> list[str]:
        plan = _plan(graph, replace(strategy, regather=patterns))
        _run(graph, plan)
        return sorted(a.name for a in plan.ranks[0].actors if "weight@" in a.name and a.reads)

    both, kept = gathered("*"), gathered()
    again = [name for name in both if name.endswith("!backward")]

    assert len(again) == 2
    assert len(kept) == len(both) - len(again)
    assert len(gathered("layers.1.*")) == len(kept) + 1


def test_strategies_keep_what_is_gathered_again_in_their_file() -> None:
    strategy = replace(strategy_of(mlp()), regather=("layers.0.*",))

    read = Strategy.from_json(strategy.to_json())

    assert read.regather == ("layers.0.*",)
    assert read.is_regathered("layers.0.weight")
    assert not read.is_regathered("layers.1.weight")
