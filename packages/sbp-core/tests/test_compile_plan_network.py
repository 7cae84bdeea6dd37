from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

import pytest
from planned_by_hand import with_mean

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import ActorId
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.plan_network import PlanNetwork
from sbp_core.compile.symmetry import fold
from sbp_core.compile.token_game import TokenGame
from sbp_core.dataflow import dead_cycle
from sbp_core.graph.ir import Rate
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.testing.graphs import cluster, mlp
from sbp_core.testing.plans import LINE, data_parallel_plan, pipeline_plan, strategy_of

_MIXED = Placement.grid((2, 2), ("pipe", "data"))


def _several_flights() -> PhysicalPlan:
    """Return a plan whose gradients are ready before the reduction of others has landed."""
    graph = mlp((64, 64, 64, 64), batch=64, num_micro_batches=2)
    machine = cluster(launch_s=1e-6, bytes_per_s=1e8)
    request = PlanRequest(graph=graph, mesh=LINE, cluster=machine)
    pins = {"batch": "S(0)", "activations": "S(0)", "parameters": "B", "gradients": "B"}
    strategy = infer_strategy(request, planner="test", pins=pins, in_flight=(2,))
    options = CompileOptions(overlap=True, bucket_bytes=0, piece_s=0.0, cluster=machine)
    return compile_plan(graph, strategy, options)


_PLANS = {
    "data": data_parallel_plan(),
    "data, overlapping": data_parallel_plan(CompileOptions(overlap=True)),
    "data, several flights at once": _several_flights(),
    "data, with a boxing thread": data_parallel_plan(CompileOptions(boxing_thread=True)),
    "1F1B": pipeline_plan(4, (2, 1)),
    "GPipe": pipeline_plan(4, (4, 4)),
    "four stages": pipeline_plan(4, (4, 3, 2, 1), widths=(4, 8, 4, 8, 4)),
    "mixed": pipeline_plan(4, (2, 1), mesh=_MIXED),
    "mixed, with a boxing thread": pipeline_plan(
        4, (2, 1), mesh=_MIXED, options=CompileOptions(boxing_thread=True)
    ),
    "mixed, overlapping": pipeline_plan(
        4, (2, 1), mesh=_MIXED, options=CompileOptions(overlap=True)
    ),
    "carried states": compile_plan(with_mean(), strategy_of(with_mean())),
    "a carried state alone on its thread": compile_plan(
        with_mean(), strategy_of(with_mean()), CompileOptions(boxing_thread=True)
    ),
}


def _with_random_times(plan: PhysicalPlan, seed: int) -> PhysicalPlan:
    """Return the plan with other times, so that other cycles become critical."""
    rng = Random(seed)
    ranks = tuple(
        replace(
            part,
            actors=tuple(replace(a, time_s=a.busy_s + rng.randint(1, 99)) for a in part.actors),
        )
        for part in plan.ranks
    )
    return replace(plan, ranks=ranks)


class _Steps:
    """Steps of a plan that follow each other, firing by firing, by what the plan says of waits."""

    def __init__(self, plan: PhysicalPlan, num_steps: int) -> None:
        self.plan = plan
        self.game = TokenGame(plan)
        #: When each actor's firings are over, those of all steps.
        self.over: dict[ActorId, list[float]] = defaultdict(list)
        self.free: dict[tuple[int, str], float] = defaultdict(float)
        self.link_free: dict[int, float] = defaultdict(float)
        #: When each step ends on each rank.
        self.ends: dict[int, list[float]] = defaultdict(lambda: [0.0])
        self.left = {
            (part.rank, thread): [
                ((part.rank, name), step * self._total((part.rank, name)) + index, step)
                for step in range(num_steps)
                for name, index in order
            ][::-1]
            for part in plan.ranks
            for thread, order in part.orders.items()
        }

    def run(self) -> list[float]:
        """Return when each step is over on all ranks."""
        while any(self.left.values()):
            fired = [self._fire(thread) for thread, left in self.left.items() if left]
            assert any(fired)
        return [max(times) for times in zip(*self.ends.values(), strict=True)][1:]

    def _total(self, actor_id: ActorId) -> int:
        return self.game.actor(actor_id).num_firings(self.plan.repetitions)

    def _fire(self, thread: tuple[int, str]) -> bool:
        actor_id, number, step = self.left[thread][-1]
        partners = self.game.partners(actor_id)
        threads = [(rank, self.game.actor((rank, name)).thread) for rank, name in partners]
        heads = [self.left[one][-1][0] if self.left[one] else None for one in threads]
        times = [self._may_begin(partner, number, step) for partner in partners]
        if heads != list(partners) or None in times:
            return False
        busy = max(self.game.actor(partner).busy_s for partner in partners)
        whole = max(self.game.actor(partner).time_s for partner in partners)
        begin = max(time for time in times if time is not None)
        over = free = max(begin, *(self.free[one] for one in threads)) + busy
        if whole > busy:
            links = [self.link_free[rank] for rank, _ in partners]
            over = max(free, *links) + whole - busy
            self.link_free.update({rank: over for rank, _ in partners})
        for partner, one in zip(partners, threads, strict=True):
            self.left[one].pop()
            self.over[partner].append(over)
            self.free[one] = free
            self._note_end(partner[0], step)
        return True

    def _note_end(self, rank: int, step: int) -> None:
        part = self.plan.by_rank[rank]
        ends = [self.over[(rank, actor.name)] for actor in part.actors]
        totals = [(step + 1) * self._total((rank, actor.name)) for actor in part.actors]
        if all(len(end) == total for end, total in zip(ends, totals, strict=True)):
            self.ends[rank].append(max(time for end in ends for time in end))

    def _may_begin(self, actor_id: ActorId, number: int, step: int) -> float | None:
        """Return when all that a firing waits for is over, if that is known."""
        rank, name = actor_id
        part, micro = self.plan.by_rank[rank], self.plan.num_micro_batches
        if len(self.ends[rank]) <= step:
            return None
        needs: list[tuple[ActorId, int]] = []
        for register in part.inputs_of[name]:
            producer = (rank, register.producer)
            sums = register.rate is Rate.STEP and self.game.actor(producer).rate is Rate.MICRO
            filling = (number + 1) * micro - 1 if sums else number - bool(register.carries)
            needs.append((producer, filling))
        for register in part.outputs_of[name]:
            sums = register.rate is Rate.STEP and self.game.actor(actor_id).rate is Rate.MICRO
            if not sums or number % micro == micro - 1:
                filling = number // micro if sums else number + bool(register.carries)
                needs += [((rank, one), filling - register.quota) for one in register.consumers]
        needs += [(link.sender, number) for link in self.game.receives[actor_id]]
        needs += [(link.receiver, number - link.quota) for link in self.game.sends[actor_id]]
        times = [self.ends[rank][step]]
        for other, index in needs:
            if index >= len(self.over[other]):
                return None
            times += [self.over[other][index]] if index >= 0 else []
        return max(times)


@pytest.mark.parametrize("plan", _PLANS.values(), ids=_PLANS)
def test_a_step_by_itself_takes_what_its_replay_takes(plan: PhysicalPlan) -> None:
    for seed in range(4):
        timed = _with_random_times(plan, seed)

        assert check(timed, types=False).latency_s == pytest.approx(
            simulate(timed).step_s, rel=1e-12
        )


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("plan", _PLANS.values(), ids=_PLANS)
def test_the_period_is_that_of_a_replay_of_many_steps(plan: PhysicalPlan) -> None:
    for timed in (plan, *(_with_random_times(plan, seed) for seed in range(4))):
        ends = _Steps(timed, 30).run()

        assert check(timed, types=False).period_s == pytest.approx(
            (ends[29] - ends[17]) / 12, rel=1e-9
        )


def test_steps_that_follow_each_other_overlap_in_a_pipeline() -> None:
    report = check(_with_random_times(_PLANS["four stages"], 0), types=False)

    assert report.period_s < report.latency_s


def test_the_critical_cycle_is_told_in_words() -> None:
    lines = check(pipeline_plan(4, (2, 1)), types=False).critical_cycle

    assert lines == (
        "stage 0's receive layers.1.grad.mm_1@0(B) of micro-batch 3 on rank 0 waits for data of "
        "stage 1's send layers.1.grad.mm_1@0(B) of micro-batch 3 on rank 1",
        "stage 1's send layers.1.grad.mm_1@0(B) of micro-batch 3 on rank 1 waits for its turn on "
        "thread compute of rank 1 after stage 1's backward.1.1 of micro-batch 3 on rank 1 and 24 "
        "more, since stage 1's receive layers.0.relu@1(B) of micro-batch 0 on rank 1",
        "stage 1's receive layers.0.relu@1(B) of micro-batch 0 on rank 1 waits for data of "
        "stage 0's send layers.0.relu@1(B) of micro-batch 0 on rank 0",
        "stage 0's send layers.0.relu@1(B) of micro-batch 0 on rank 0 waits for its turn on thread "
        "compute of rank 0 after stage 0's forward.0.0 of micro-batch 0 on rank 0 and 7 more, "
        "since stage 0's receive layers.1.grad.mm_1@0(B) of micro-batch 3 on rank 0 of the step "
        "before",
    )


def test_of_ranks_that_do_the_same_one_is_named_with_the_number_of_others() -> None:
    lines = check(pipeline_plan(4, (2, 1), mesh=_MIXED), types=False).critical_cycle

    assert any("on ranks 0-1" in line or "on rank 0 (and 1 alike)" in line for line in lines)
    assert all("(and 1 alike)" in line or "ranks" in line for line in lines)


def test_a_register_that_is_too_small_is_named_with_the_quota_that_is_enough() -> None:
    plan = pipeline_plan(4, (4, 1))
    stash = next(r for r in plan.by_rank[0].registers if r.name == "forward.0.0#0")
    part = plan.by_rank[0]
    # The order stays that of a quota of 4: four micro-batches forward, then all backward.
    registers = tuple(replace(r, quota=1) if r is stash else r for r in part.registers)
    broken = replace(plan, ranks=(replace(part, registers=registers), *plan.ranks[1:]))

    raised = PlanNetwork(fold(broken)).quotas_to_raise()

    assert raised.startswith(f"raise the quota of register {stash.name} of rank 0 from 1 to ")
    enough = int(raised.partition(";")[0].rsplit(" ", 1)[1])
    for quota, is_live in ((enough, True), (enough - 1, False)):
        registers = tuple(replace(r, quota=quota) if r is stash else r for r in part.registers)
        tried = replace(plan, ranks=(replace(part, registers=registers), *plan.ranks[1:]))
        assert (dead_cycle(PlanNetwork(fold(tried)).network) is None) == is_live


def test_orders_that_contradict_data_are_not_blamed_on_quotas() -> None:
    plan = pipeline_plan(2, (2, 1))
    part = plan.by_rank[0]
    late = (part.orders["compute"][-1], *part.orders["compute"][:-1])
    broken = replace(plan, ranks=(replace(part, orders={"compute": late}), *plan.ranks[1:]))

    assert PlanNetwork(fold(plan)).quotas_to_raise() == ""
    assert PlanNetwork(fold(broken)).quotas_to_raise().startswith("no quota helps")
