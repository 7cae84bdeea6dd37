"""A limit of memory in the search over all mesh axes: what is counted, and a price on it."""

from random import Random

import pytest
from plan_requests import request

from sbp_core.graph import InputKind
from sbp_core.infer import FORBIDDEN_S, joint_problem
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster, mlp
from sbp_planner.choice import solve
from sbp_planner.joint.layers import repeated, tie
from sbp_planner.joint.lifetime import held, waiting_bytes
from sbp_planner.joint.lower import lower_step
from sbp_planner.joint.priced import PricedMemory
from sbp_planner.joint.search import JointSearch, JointSettings


def slow_mlp():
    """Layers whose products are cheapest where everything is whole, as links are slow."""
    mesh = Placement.grid((2,), ("data",))
    machine = cluster(num_devices=2, bytes_per_s=1e4, latency_s=1e-3)
    graph = mlp((32, 32, 32, 32), batch=64)
    return joint_problem(PlanRequest(graph=graph, mesh=mesh, cluster=machine))


@pytest.mark.slow
def test_a_price_on_memory_keeps_to_the_limit_and_rises_with_what_is_short():
    problem = slow_mlp()
    counted = held(problem, 1e12)
    free = tuple(problem.start)
    limit = 0.8 * counted.peak_bytes(free)
    memory = counted.within(limit)
    search = PricedMemory(problem, tie(problem), memory, free, max_entries=1 << 16)

    found = search.within(limit)
    tighter = search.within(0.8 * limit)

    lowered = lower_step(problem, ties=repeated(problem), held=memory)
    best = solve(lowered.choice, time_limit_s=30)
    assert best.proved
    assert found is not None
    assert memory.peak_bytes(found) <= limit < memory.peak_bytes(free)
    # No better than the best, from which it may be far where there is little to choose.
    assert best.cost * (1 - 1e-9) <= problem.cost(found)
    assert tighter is None or problem.cost(found) <= problem.cost(tighter)


def test_states_are_a_part_of_what_is_held():
    problem = slow_mlp()
    counted = held(problem, 1e12)

    for values in ([0] * len(problem.unary), problem.start):
        states = waiting_bytes(problem, values, (0,))
        assert 0 < states <= waiting_bytes(problem, values, (1,)) <= counted.peak_bytes(values)
    assert waiting_bytes(problem, [0] * len(problem.unary), (0,)) == sum(
        problem.work.graph.tensor(entry.name).size_bytes
        for entry in problem.work.inputs
        if entry.kind is not InputKind.BATCH
    )


def staged_search(seed: int, limit: float = 1e12) -> JointSearch:
    """Return the search for a step of four micro-batches on two stages of two ranks."""
    mesh = Placement.grid((2, 2), ("pipe", "data"))
    graph = mlp((8, 16, 32, 16, 8), batch=16 << seed, num_micro_batches=4)
    machine = cluster(num_devices=4, bytes_per_s=1e9)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine)
    return JointSearch(request, JointSettings(planner="test"), limit, {})


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("seed", range(3))
def test_a_compiled_plan_holds_no_less_than_what_waits(seed: int) -> None:
    search, random = staged_search(seed), Random(seed)
    problem = search.problem
    free, sizes = search.cheapest().values, problem.sizes
    tried = [free]
    for _ in range(8):
        # Another signature of a few operators.
        at = random.sample(range(len(free)), 3)
        tried.append(
            tuple(random.randrange(sizes[v]) if v in at else x for v, x in enumerate(free))
        )
    possible = [values for values in tried if problem.cost(values) < FORBIDDEN_S]

    for values in possible:
        waits = waiting_bytes(problem, values, search.in_flight)
        plan = search.compilation.plan(search.strategy(values, is_predicted=False))
        held_bytes, _, is_exact = search.compilation.memory(plan, exact=True)
        assert is_exact
        assert waiting_bytes(problem, values, (0, 0)) < waits <= held_bytes
    assert len(possible) > 2


@pytest.mark.slow
def test_what_cannot_fit_with_what_waits_is_not_compiled() -> None:
    search = staged_search(2)
    free = search.cheapest()
    waits = waiting_bytes(search.problem, free.values, search.in_flight)

    search.limit_bytes = search.compilation.limit_bytes = waits - 1
    search.fitting(free)

    assert free.values not in search.plans


def test_a_limit_that_nothing_keeps_to_has_no_price():
    problem = slow_mlp()
    memory = held(problem, 1.0)

    search = PricedMemory(problem, tie(problem), memory, problem.start, max_entries=1 << 16)

    assert search.within(1.0) is None


def test_what_waits_for_the_backward_phase_is_held_for_each_micro_batch_in_flight():
    problem = joint_problem(request((2,), ("data",)), from_axes=False)

    once, thrice = held(problem, 1e9), held(problem, 1e9, in_flight=(3,))

    product = problem.node_variable["blocks.0.mlp.gelu"]
    update = problem.node_variable["head.weight.update.div"]
    assert thrice.usages[product].tolist() == (3 * once.usages[product]).tolist()
    assert thrice.usages[update].tolist() == once.usages[update].tolist()


def test_places_add_up_to_what_values_hold_there():
    problem = slow_mlp()
    counted = held(problem, 1e12)
    values = [0] * len(problem.unary)

    by_place = counted.by_place(values)

    for place in (0, len(by_place) // 2):
        alive = sum(
            int(usage[0])
            for usage, (start, end) in zip(counted.usages, counted.intervals, strict=True)
            if start <= place < end
        )
        assert by_place[place] == pytest.approx(alive)
