"""Plans whose collectives are begun early, and waited for where their results are used."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import Collective
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.testing.graphs import Builder, cluster, mlp
from sbp_core.testing.plans import strategy_of

_PINS = {"batch": "S(0)", "activations": "S(0)", "parameters": "B", "gradients": "B"}


def _plan(
    pins: dict[str, object],
    *,
    bytes_per_s: float = 1e9,
    micro_batches: int = 1,
    busy: float = 0.0,
    **options: object,
) -> PhysicalPlan:
    graph = mlp((64, 64, 64, 64), batch=64, num_micro_batches=micro_batches)
    machine = cluster(launch_s=1e-6, bytes_per_s=bytes_per_s)
    machine = replace(machine, device=replace(machine.device, boxing_busy=busy))
    mesh = Placement.grid((2,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine, pins={})
    strategy = infer_strategy(request, planner="test", pins=pins, in_flight=(micro_batches,))
    settings = {"bucket_bytes": 0, "piece_s": 0.0, "cluster": machine, **options}
    plan = compile_plan(graph, strategy, CompileOptions(**settings))
    check(plan)
    return plan


def _order(plan: PhysicalPlan) -> list[str]:
    return [name for name, _ in plan.by_rank[0].orders["compute"]]


def _gradients(plan: PhysicalPlan) -> list[str]:
    return [
        actor.name
        for actor in plan.by_rank[0].actors
        if isinstance(actor, Collective) and "grad" in actor.name
    ]


def test_gradients_are_reduced_while_the_backward_phase_goes_on() -> None:
    plan = _plan(_PINS, overlap=True)

    order, sums = _order(plan), _gradients(plan)
    last = max(order.index(name) for name in order if name.startswith("backward."))
    begun = [name for name in sums if order.index(name) < last]
    assert len(sums) == 3
    assert len(begun) == 2  # the gradient of the first layer is made last
    assert all(plan.by_rank[0].by_name[name].overlaps for name in sums)  # type: ignore[union-attr]


def test_what_overlaps_counts_once_in_the_time_of_a_step() -> None:
    apart, together = _plan(_PINS, piece_s=inf), _plan(_PINS, overlap=True)

    sums_s = sum(together.by_rank[0].by_name[name].time_s for name in _gradients(together))
    assert simulate(together).step_s < simulate(apart).step_s
    assert simulate(apart).step_s - simulate(together).step_s < sums_s


def test_links_move_one_thing_after_the_other() -> None:
    plan = _plan(_PINS, overlap=True, bytes_per_s=1e7)

    actors, sums = plan.by_rank[0].actors, _gradients(plan)
    sums_s = sum(actor.time_s for actor in actors if actor.name in sums)
    others_s = sum(actor.time_s for actor in actors if actor.name not in sums)
    assert sums_s > 10 * others_s
    assert sums_s < simulate(plan).step_s < sums_s + others_s


def test_while_activations_are_summed_another_micro_batch_goes_on() -> None:
    pins = {"batch": "B", "layers.0.weight": "S(1)", "layers.1.weight": "S(0)"}
    plan = _plan(pins, overlap=True, bytes_per_s=1e8, micro_batches=2)

    # compute   f0 | begin sum 0 | f1 | begin sum 1 |   rest of f0   b0   rest of f1   b1
    # link              sum 0 -----------------------|  sum 1 ------------|
    order = plan.by_rank[0].orders["compute"]
    first, summed, rest = "forward.0.0", "layers.1.mm@0(B)", "forward.0.1"
    assert order[:4] == ((first, 0), (summed, 0), (first, 1), (summed, 1))
    assert order.index((rest, 0)) < order.index(("backward.0.1", 0)) < order.index((rest, 1))


def test_parameters_are_gathered_no_further_ahead_than_asked() -> None:
    pins = {"batch": "S(0)", "parameters": "S(0)", "gradients": "S(0)", "updates": "S(0)"}

    for prefetch in (0, 1):
        order = _order(_plan(pins, overlap=True, prefetch=prefetch))
        gathers = [n for n in order if n.endswith("!forward")]
        segments = [n for n in order if n.startswith("forward.")]
        ahead = [
            sum(order.index(name) < order.index(segment) for name in gathers)
            for segment in segments
        ]
        # The n-th segment uses the n-th parameter.
        assert max(seen - at for at, seen in enumerate(ahead, 1)) <= prefetch


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("in_flight", [(1,), (4,), (2, 1), (4, 4)])
def test_a_stage_that_waits_gathers_no_further_ahead_than_asked(
    in_flight: tuple[int, ...], prefetch: int
) -> None:
    graph, stages = mlp((64,) * 9, batch=64, num_micro_batches=4), len(in_flight)
    pins = {**_PINS, "parameters": "S(0)", "gradients": "S(0)", "updates": "S(0)"}
    mesh = Placement.grid((stages, 2), ("pipe", "data"))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    strategy = infer_strategy(request, planner="test", pins=pins, in_flight=in_flight)
    plan = compile_plan(graph, strategy, CompileOptions(bucket_bytes=0, prefetch=prefetch))

    check(plan)
    for part in plan.ranks:
        users = {register.producer: register.consumers for register in part.registers}
        alive: set[tuple[str, int]] = set()
        most = 0
        for name, index in part.orders["compute"]:
            alive -= {entry for entry in alive if entry[1] == index and name in users[entry[0]]}
            if name.endswith(("!forward", "!backward")):
                alive.add((name, index))
            most = max(most, len(alive))
        # That of the segment that fires next, and those for the segments after the wait.
        assert 1 <= most <= 2 + (prefetch if stages > 1 else 0)


def test_an_update_that_only_reads_states_does_not_begin_with_the_step() -> None:
    pins = {"batch": "S(0)", "parameters": "B", "optimizer_states": "S(0)", "updates": "S(0)"}

    order = _order(_plan(pins, overlap=True))

    first = next(at for at, name in enumerate(order) if name.startswith("optimizer."))
    assert first > max(at for at, name in enumerate(order) if name.startswith("forward."))


def test_a_gather_of_states_for_updates_does_not_begin_with_the_step() -> None:
    pins = {**_PINS, "optimizer_states": "S(0)", "updates": "B"}

    order = _order(_plan(pins, overlap=True))

    first = next(at for at, name in enumerate(order) if "exp_avg" in name)
    assert first > max(at for at, name in enumerate(order) if name.startswith("forward."))


def test_a_decay_is_done_with_its_update() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("w")), (4, 4))
    b.op("g", "mm.default", (Ref("x"), Ref("y")), (4, 4), phase=Phase.BACKWARD)
    for name, op, args in (
        ("decayed", "mul.Tensor", (Ref("w"), 0.9)),
        ("new", "sub.Tensor", (Ref("decayed"), Ref("g"))),
    ):
        b.op(name, op, args, (4, 4), phase=Phase.OPTIMIZER, pointwise=True)
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="new"))
    graph = b.graph()
    strategy = strategy_of(graph, signatures={"g": "S(1) | S(0) -> P"})

    plan = compile_plan(graph, strategy, CompileOptions(overlap=True, piece_s=0.0))

    (update,) = (a for a in plan.by_rank[0].actors if a.name.startswith("optimizer."))
    assert update.inputs == ("g@0(B)",)


def test_overlap_hides_only_what_does_not_need_the_core_of_the_rank() -> None:
    apart = simulate(_plan(_PINS, piece_s=inf)).step_s
    hidden, half, none = (
        simulate(_plan(_PINS, overlap=True, busy=busy)).step_s for busy in (0.0, 0.5, 1.0)
    )

    assert hidden < half < none
    assert none == pytest.approx(apart, rel=1e-6)


def test_what_is_waited_for_at_once_takes_as_long_whoever_moves_it() -> None:
    # Nothing is computed between the gradients and the commit.
    hidden, half, none = (
        simulate(_plan(_PINS, overlap=True, piece_s=inf, busy=busy)).step_s
        for busy in (0.0, 0.5, 1.0)
    )

    assert hidden == pytest.approx(half, rel=1e-6)
    assert hidden == pytest.approx(none, rel=1e-6)
