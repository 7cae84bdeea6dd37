"""The simulated step of a plan, against an event-by-event play of the token game."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import ActorId
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.token_game import TokenGame
from sbp_core.errors import PlanError
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.simulation import FiringNetwork, Simulation, simulate
from sbp_core.testing.graphs import cluster, mlp
from sbp_core.testing.plans import pipeline_plan

_DATA = {"batch": "S(0)", "activations": "S(0)", "parameters": "B", "gradients": "B"}
_TENSOR = {"batch": "B", "layers.0.weight": "S(1)", "layers.1.weight": "S(0)"}


def _plan(
    pins: dict[str, object], *, micro_batches: int = 1, bytes_per_s: float = 1e8, overlap: bool
) -> PhysicalPlan:
    graph = mlp((64, 64, 64, 64), batch=64, num_micro_batches=micro_batches)
    machine = cluster(launch_s=1e-6, bytes_per_s=bytes_per_s)
    mesh = Placement.grid((2,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine, pins={})
    strategy = infer_strategy(request, planner="test", pins=pins, in_flight=(micro_batches,))
    options = CompileOptions(bucket_bytes=0, piece_s=0.0, cluster=machine, overlap=overlap)
    return compile_plan(graph, strategy, options)


PLANS = {
    "data": _plan(_DATA, overlap=False),
    "data, overlapping": _plan(_DATA, overlap=True, micro_batches=2),
    "data, slow links": _plan(_DATA, overlap=True, bytes_per_s=1e7),
    "tensor, overlapping": _plan(_TENSOR, overlap=True, micro_batches=3),
    "1f1b": pipeline_plan(4, (2, 1)),
    "gpipe": pipeline_plan(4, (4, 4)),
    "three stages": pipeline_plan(5, (3, 2, 1), widths=(4, 4, 4, 4)),
    "several updates": pipeline_plan(6, (2, 1), num_updates=3),
    "pipedream": pipeline_plan(5, (2, 1), num_updates=5, staleness=(1, 0)),
    "2bw": pipeline_plan(9, (3, 2, 1), widths=(4, 4, 4, 4), num_updates=3, staleness=(1, 1, 1)),
    "2bw, overlapping": pipeline_plan(
        8,
        (2, 1),
        mesh=Placement.grid((2, 2), ("pipe", "data")),
        options=CompileOptions(overlap=True, piece_s=0.0),
        num_updates=2,
        staleness=(1, 1),
    ),
}


def _ends(plan: PhysicalPlan) -> dict[tuple[ActorId, int], float]:
    """Return when each firing ends, by the token game alone: at each moment all that can begin."""
    game, now = TokenGame(plan), 0.0
    orders = {
        (part.rank, name): list(one) for part in plan.ranks for name, one in part.orders.items()
    }
    thread = {
        (rank, name): key for key, one in orders.items() for name, _ in one for rank in key[:1]
    }
    busy: dict[tuple[int, str], float] = {}
    flying: dict[int, float] = {}
    landings: list[tuple[float, ActorId]] = []
    ends: dict[tuple[ActorId, int], float] = {}
    at_end: list[tuple[float, ActorId]] = []

    def can_begin(actor_id: ActorId) -> bool:
        return all(
            orders[thread[one]][:1]
            and orders[thread[one]][0][0] == one[1]
            and thread[one] not in busy
            and game.is_ready(one)
            for one in game.partners(actor_id)
        )

    while any(orders.values()) or at_end or landings:
        begun = True
        while begun:
            begun = False
            for key in orders:
                if orders[key] and can_begin(head := (key[0], orders[key][0][0])):
                    begun = True
                    partners = game.partners(head)
                    for one in partners:
                        game.start(one)
                        orders[thread[one]].pop(0)
                    length = max(game.actor(one).busy_s for one in partners)
                    busy.update(dict.fromkeys((thread[one] for one in partners), now + length))
                    at_end.append((now + length, head))
        now = min(when for when, _ in at_end + landings)
        for event in sorted(at_end):
            if event[0] != now:
                continue
            at_end.remove(event)
            partners = game.partners(event[1])
            for one in partners:
                del busy[thread[one]]
            whole = max(game.actor(one).time_s for one in partners)
            rest = whole - max(game.actor(one).busy_s for one in partners)
            if rest:
                land = max([now, *(flying.get(rank, 0.0) for rank, _ in partners)]) + rest
                flying.update({rank: land for rank, _ in partners})
                landings.append((land, event[1]))
            else:
                landings.append((now, event[1]))
        for event in [one for one in landings if one[0] == now]:
            landings.remove(event)
            for one in game.partners(event[1]):
                ends[one, game.finished[one]] = now
                game.finish(one)
    return ends


def _found(simulation: Simulation) -> dict[tuple[ActorId, int], float]:
    return {((one.rank, one.actor.name), one.index): one.end_s for one in simulation.firings}


@pytest.mark.parametrize("name", PLANS)
def test_every_firing_ends_when_a_play_of_the_token_game_ends_it(name: str) -> None:
    plan = PLANS[name]

    found = simulate(plan)

    assert _found(found) == _ends(plan)
    assert found.step_s == max(_found(found).values())


@pytest.mark.parametrize("name", PLANS)
def test_a_thread_fires_in_the_plans_order_and_one_thing_at_a_time(name: str) -> None:
    plan = PLANS[name]

    found = simulate(plan)

    for part in plan.ranks:
        for thread, order in part.orders.items():
            mine = [
                one for one in found.firings if (one.rank, one.actor.thread) == (part.rank, thread)
            ]
            assert [(one.actor.name, one.index) for one in mine] == list(order)
            assert all(one.free_s <= after.start_s for one, after in pairwise(mine))
            assert found.busy_s[part.rank, thread] <= found.step_s


def test_a_flight_of_overlapping_boxing_goes_on_when_its_thread_is_free() -> None:
    found = simulate(PLANS["data, overlapping"])

    flights = [one for one in found.firings if one.end_s > one.free_s]
    assert flights
    assert all(one.actor.overlaps for one in flights)


def test_a_pipeline_of_equal_stages_takes_the_closed_form_of_its_schedule() -> None:
    # GPipe and 1F1B of p stages and m micro-batches: (m + p - 1) (F + B) of a stage.
    plan = PLANS["1f1b"]
    times_s = {"forward": 1.0, "backward": 2.0}
    ranks = tuple(
        replace(
            part,
            actors=tuple(
                replace(one, time_s=times_s.get(one.name.split(".")[0], 0.0)) for one in part.actors
            ),
        )
        for part in plan.ranks
    )

    assert simulate(replace(plan, ranks=ranks)).step_s == (4 + 2 - 1) * 3.0


def test_a_plan_that_stands_still_is_refused() -> None:
    plan = PLANS["1f1b"]
    order = dict(plan.ranks[0].orders)
    thread, firings = next(iter(order.items()))
    late = replace(plan.ranks[0], orders={**order, thread: (firings[-1], *firings[:-1])})

    with pytest.raises(PlanError, match="deadlocks"):
        simulate(replace(plan, ranks=(late, *plan.ranks[1:])))


_Told = dict[str, dict[Any, Any]]


def _with_quotas(plan: PhysicalPlan, rng: Random) -> tuple[PhysicalPlan, _Told]:
    """Return a plan with up to three other quotas, and what `change` is told of them."""
    places: list[Any] = [(part.rank, one.name) for part in plan.ranks for one in part.registers]
    senders: list[Any] = sorted({link.sender for link in plan.links})
    told: _Told = {
        "quotas": {place: rng.randint(1, 6) for place in rng.sample(places, rng.randint(0, 3))},
        "link_quotas": {
            sender: rng.randint(1, 6)
            for sender in rng.sample(senders, min(rng.randint(0, 3), len(senders)))
        },
    }
    ranks = tuple(
        replace(
            part,
            registers=tuple(
                replace(one, quota=told["quotas"].get((part.rank, one.name), one.quota))
                for one in part.registers
            ),
        )
        for part in plan.ranks
    )
    links = tuple(
        replace(one, quota=told["link_quotas"].get(one.sender, one.quota)) for one in plan.links
    )
    return replace(plan, ranks=ranks, links=links), told


def _with_orders(plan: PhysicalPlan, rng: Random) -> tuple[PhysicalPlan, _Told]:
    """Return a plan in which one firing comes earlier on its thread, and what `change` is told."""
    part = rng.choice(plan.ranks)
    orders = {thread: list(order) for thread, order in part.orders.items()}
    order = orders[rng.choice(list(orders))]
    at = rng.randrange(1, len(order))
    to = max(0, at - rng.randint(1, 6))
    if order[at][0] not in [name for name, _ in order[to:at]]:
        order.insert(to, order.pop(at))
    made = {thread: tuple(order) for thread, order in orders.items()}
    ranks = tuple(replace(one, orders=made) if one is part else one for one in plan.ranks)
    return replace(plan, ranks=ranks), {"orders": {part.rank: made}}


def _of_many_quotas(plan: PhysicalPlan, rng: Random) -> PhysicalPlan:
    """Return a plan with room to lower quotas, all of whose ranks differ in their times."""
    return replace(
        plan,
        links=tuple(replace(link, quota=5) for link in plan.links),
        ranks=tuple(
            replace(
                part,
                actors=tuple(
                    replace(one, time_s=one.time_s * rng.uniform(0.2, 5)) for one in part.actors
                ),
                registers=tuple(replace(one, quota=6) for one in part.registers),
            )
            for part in plan.ranks
        ),
    )


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", ["data, overlapping", "tensor, overlapping", "three stages"])
@pytest.mark.parametrize("edit", [_with_quotas, _with_orders])
def test_a_changed_network_is_that_of_the_changed_plan(
    name: str, edit: Callable[[PhysicalPlan, Random], tuple[PhysicalPlan, _Told]]
) -> None:
    rng = Random(name)
    plan = _of_many_quotas(PLANS[name], rng)
    network, times_s, outcomes = FiringNetwork(plan), set(), set()

    for _ in range(100):
        changed, told = edit(plan, rng)
        is_live = network.change(**told)
        if is_live:
            plan = changed
            times_s.add(tuple(network.simulate().ends_s))
        else:
            with pytest.raises(PlanError, match="deadlocks"):
                simulate(changed)
        outcomes.add(is_live)
        assert _found(network.simulate()) == _found(simulate(plan))

    if name == "three stages" or edit is _with_orders:
        assert outcomes == {True, False}
        assert len(times_s) > 3


def _with_twins(plan: PhysicalPlan) -> PhysicalPlan:
    """Return a plan with two of each register: a firing waits twice for each credit."""
    ranks = tuple(
        replace(
            part,
            registers=tuple(
                twin
                for one in part.registers
                for twin in (one, replace(one, name=f"{one.name} again", keys=()))
            ),
        )
        for part in plan.ranks
    )
    return replace(plan, ranks=ranks)


def test_a_firing_that_waits_twice_waits_no_more_when_both_quotas_are_raised() -> None:
    plan, gpipe = _with_twins(PLANS["1f1b"]), _with_twins(PLANS["gpipe"])
    network = FiringNetwork(plan)
    orders = {part.rank: part.orders for part in gpipe.ranks}

    assert not network.change(orders=orders)
    assert network.change(
        quotas={(part.rank, one.name): one.quota for part in gpipe.ranks for one in part.registers},
        link_quotas={link.sender: link.quota for link in gpipe.links},
    )
    assert network.change(orders=orders)
    assert _found(network.simulate()) == _found(simulate(gpipe))


def test_a_change_is_of_all_ranks_that_do_the_same() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=Placement.grid((2, 4), ("pipe", "data")))
    stash = next(one for one in plan.by_rank[1].registers if one.name == "forward.0.0#0")
    network = FiringNetwork(plan)

    assert not network.change(quotas={(1, stash.name): 1})
    assert network.change(quotas={(1, stash.name): 2})
    assert _found(network.simulate()) == _found(simulate(plan))


def test_an_order_of_other_firings_is_refused() -> None:
    plan = PLANS["1f1b"]
    order = plan.by_rank[0].orders["compute"]

    for other in (order[1:], (order[1], *order[1:]), order[::-1]):
        with pytest.raises(PlanError, match="other firings than before"):
            FiringNetwork(plan).change(orders={0: {"compute": other}})


def test_ranks_that_do_the_same_share_their_times() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=Placement.grid((2, 4), ("pipe", "data")))

    found = simulate(plan)

    for part in plan.ranks:
        assert found.orders[part.rank, "compute"] is found.orders[part.rank // 4 * 4, "compute"]
    assert len(found.firings) == check(plan).num_firings
    assert _found(found) == _ends(plan)
