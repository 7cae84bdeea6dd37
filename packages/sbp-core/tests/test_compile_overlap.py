"""Plans whose collectives are begun early, and waited for where their results are used."""

from __future__ import annotations

from math import inf

from sbp_core.check import check
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.physical import Collective, PhysicalPlan
from sbp_core.infer import infer_strategy, step_time_s
from sbp_core.placement import Placement
from sbp_core.plugins.kinds import PlanRequest
from sbp_core.testing.graphs import cluster, mlp

_PINS = {"batch": "S(0)", "activations": "S(0)", "parameters": "B", "gradients": "B"}


def _plan(pins: dict[str, object], **options: object) -> PhysicalPlan:
    graph, machine = mlp((64, 64, 64, 64), batch=64), cluster(launch_s=1e-6)
    mesh = Placement.grid((2,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine, pins={})
    strategy = infer_strategy(request, planner="test", pins=pins)
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
    assert step_time_s(together) < step_time_s(apart)
    assert step_time_s(apart) - step_time_s(together) < sums_s


def test_links_move_one_thing_after_the_other() -> None:
    plan = _plan(_PINS, overlap=True)

    sums = [plan.by_rank[0].by_name[name] for name in _gradients(plan)]
    assert step_time_s(plan) > sum(actor.time_s for actor in sums)


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


def test_an_update_that_only_reads_states_does_not_begin_with_the_step() -> None:
    pins = {"batch": "S(0)", "parameters": "B", "optimizer_states": "S(0)", "updates": "S(0)"}

    order = _order(_plan(pins, overlap=True))

    first = next(at for at, name in enumerate(order) if name.startswith("optimizer."))
    assert first > max(at for at, name in enumerate(order) if name.startswith("forward."))
