"""Time the overhead of the actor runtime over direct calls of the same functions.

    python integration/benchmarks/firing_time.py [ROUNDS]

The first plans have actors that do almost nothing, as a chain and as diamonds, on one rank and on
two ranks that are threads of this process. The overhead is the host time of a step minus that of
direct calls in the same order, divided by the number of firings. On two ranks the direct calls pass
no data, so sends, receives and the waking of threads count as overhead. Then follows a GPT on one
rank, with the ratio of its step to direct calls. The ways take turns; times are medians. Nothing is
asserted, because machines differ.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from step_time import machine, make_program, model_loss, preset_planner
from torch import Tensor

from sbp_actor_runtime import ActorConfig, ActorRuntime
from sbp_aten.passes import prepare_step
from sbp_core import PlanRequest, check, compile_plan
from sbp_core.boxing import route
from sbp_core.compile import (
    Accumulate,
    Channel,
    Compute,
    Instruction,
    PhysicalPlan,
    RankPlan,
    Receive,
    Register,
    Send,
    StateSlot,
    keys_out,
    order_firings,
)
from sbp_core.graph import InputKind, Phase, Rate, Ref
from sbp_core.placement import Placement
from sbp_core.plugins import discover
from sbp_core.sbp import B, NdSbp
from sbp_core.units import format_seconds
from sbp_torch.boxing import LocalBackend
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime import Accumulation, overwrite
from sbp_torch.segments import segment_function

#: For small plans: micro-batches of a step, actors of one rank, and the quota of registers.
MICRO_BATCHES, ACTORS, QUOTA = 16, 12, 2

BATCH_SIZE, LEARNING_RATE = 8, 3e-4

Step = Callable[[Mapping[str, Tensor]], object]
WHOLE = NdSbp(B)


class PlanMaker:
    """A builder of plans of small actors.

    Args:
        num_ranks: Number of ranks. Each is one stage, and sends its last value to the next.
    """

    def __init__(self, num_ranks: int) -> None:
        self.stages = tuple(Placement([rank], ["pipe"]) for rank in range(num_ranks))
        self.actors: list[list[Any]] = [[] for _ in self.stages]
        self.registers: list[list[Register]] = [[] for _ in self.stages]
        self.steps = tuple(
            route((), "float32", (before, WHOLE), (after, WHOLE)).steps[0]
            for before, after in zip(self.stages, self.stages[1:], strict=False)
        )

    def compute(self, rank: int, name: str, op: str, *inputs: str) -> str:
        """Add an actor that calls one operator; return its key."""
        reads = ("x",) if inputs == ("x",) else ()
        self.actors[rank].append(
            Compute(
                name=name,
                stage=rank,
                phase=Phase.FORWARD,
                rate=Rate.MICRO,
                thread="compute",
                inputs=() if reads else inputs,
                reads=reads,
                outputs=(name,),
                instructions=(
                    Instruction(op=op, args=tuple(map(Ref, inputs)), outputs=(name,), node=name),
                ),
            )
        )
        return name

    def transfer(self, rank: int, key: str) -> str:
        """Add the transfer of a value to the next rank; return its key there."""
        own = {"phase": Phase.FORWARD, "rate": Rate.MICRO, "thread": "compute", "step": rank}
        made = f"{key}@{rank + 1}"
        send = Send(name=f"send {made}", stage=rank, inputs=(key,), **own)
        receive = Receive(
            name=f"receive {made}", stage=rank + 1, makes=made, outputs=(made,), **own
        )
        self.actors[rank].append(send)
        self.actors[rank + 1].append(receive)
        return made

    def plan(self) -> PhysicalPlan:
        """Return the plan, with an order."""
        links = tuple(
            Channel(
                name=f"link {rank}",
                sender=(rank, next(one.name for one in sending if isinstance(one, Send))),
                receiver=(rank + 1, self.actors[rank + 1][0].name),
                quota=QUOTA,
            )
            for rank, sending in enumerate(self.actors[:-1])
        )
        x = StateSlot(
            name="x",
            kind=InputKind.BATCH,
            shape=(1,),
            dtype="float32",
            stage=0,
            sbp=WHOLE,
            local_shape=(1,),
        )
        ranks = [
            RankPlan(
                rank=rank,
                slots=(x,) if rank == 0 else (),
                actors=tuple(actors),
                registers=tuple(_registers(actors)),
                orders={},
            )
            for rank, actors in enumerate(self.actors)
        ]
        return order_firings(
            PhysicalPlan(
                graph_hash="",
                planner="by hand",
                num_micro_batches=MICRO_BATCHES,
                ties={},
                stages=self.stages,
                steps=self.steps,
                links=links,
                ranks=tuple(ranks),
            )
        )


def _registers(actors: Sequence[Any]) -> list[Register]:
    """Return a register for each value that an actor reads."""
    readers = {
        key: tuple(other.name for other in actors if key in other.inputs)
        for actor in actors
        for key in actor.outputs
    }
    return [
        Register(
            name=f"{actor.name}#0",
            producer=actor.name,
            consumers=readers[key],
            keys=(key,),
            rate=Rate.MICRO,
            quota=QUOTA,
        )
        for actor in actors
        for key in actor.outputs
        if readers[key]
    ]


def chain(num_ranks: int) -> PhysicalPlan:
    """a -> b -> c ..., on each rank in turn."""
    maker, key = PlanMaker(num_ranks), "x"
    for rank in range(num_ranks):
        for index in range(ACTORS):
            op = "aten.sum.default" if key == "x" else "aten.neg.default"
            key = maker.compute(rank, f"a{rank}.{index}", op, key)
        if rank < num_ranks - 1:
            key = maker.transfer(rank, key)
    return maker.plan()


def diamonds(num_ranks: int) -> PhysicalPlan:
    """a -> b and c -> d -> e and f ..., on each rank in turn."""
    maker, key = PlanMaker(num_ranks), "x"
    for rank in range(num_ranks):
        for index in range(ACTORS // 4):
            name = f"{rank}.{index}"
            op = "aten.sum.default" if key == "x" else "aten.neg.default"
            top = maker.compute(rank, f"a{name}", op, key)
            left = maker.compute(rank, f"b{name}", "aten.neg.default", top)
            right = maker.compute(rank, f"c{name}", "aten.neg.default", top)
            key = maker.compute(rank, f"d{name}", "aten.add.Tensor", left, right)
        if rank < num_ranks - 1:
            key = maker.transfer(rank, key)
    return maker.plan()


class Direct:
    """Direct calls of the functions of a plan's actors, in its order and without boxing."""

    def __init__(self, plan: PhysicalPlan, states: Mapping[str, Any]) -> None:
        self.plan, self.states = plan, dict(states)
        self.calls: list[tuple[Any, int, Callable[..., Any], list[str]]] = []
        for part in plan.ranks:
            made: dict[str, Callable[..., Any]] = {}
            for name, index in part.orders["compute"]:
                actor = part.by_name[name]
                if name not in made:
                    made[name] = _function(plan, part.rank, actor)
                self.calls.append((actor, index, made[name], []))
        self._let_die()

    def _let_die(self) -> None:
        """Find the values that are used last by each call."""
        seen: set[tuple[str, int]] = set()
        for actor, index, _, dying in reversed(self.calls):
            for key in actor.inputs:
                at = index if self._rate_of(key) is Rate.MICRO else 0
                if (key, at) not in seen:
                    seen.add((key, at))
                    dying.append(key)

    def _rate_of(self, key: str) -> Rate:
        for actor, _, _, _ in self.calls:
            if key in actor.outputs:
                return actor.fill_rate
        raise KeyError(key)

    def step(self, fed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Run a step; return its results."""
        micro: list[dict[str, Any]] = [dict(values) for values in fed]
        whole: dict[str, Any] = {}
        results: dict[str, Any] = {}
        for actor, index, function, dying in self.calls:
            held, states = micro[index], self.states
            given = [
                held[key] if key in held else whole[key] if key in whole else states[key]
                for key in (*actor.inputs, *actor.reads)
            ]
            for key in dying:
                held.pop(key, None)
                whole.pop(key, None)
            made = function(given, index)
            (held if actor.fill_rate is Rate.MICRO else whole).update(made)
            for name, key in actor.emits if made else ():
                results[name] = made[key]
            for name, key in actor.writes if made else ():
                if name in actor.in_place:
                    overwrite(states[name], made[key])
                else:
                    states[name] = made[key]
        return results


def _function(plan: PhysicalPlan, rank: int, actor: Any) -> Callable[..., Any]:
    if isinstance(actor, Compute):
        segment, keys = segment_function(actor, rank, plan.steps, owns=True), keys_out(actor)
        return lambda given, index: dict(zip(keys, segment(given), strict=True))
    if isinstance(actor, Accumulate):
        sums = Accumulation(actor, plan.num_micro_batches)
        return lambda given, index: sums.add(
            index, dict(zip((*actor.inputs, *actor.reads), given, strict=True))
        )
    if isinstance(actor, Receive):
        return lambda given, index: {actor.makes: torch.zeros(())}
    return lambda given, index: {}


def interleaved(steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 3):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn >= 3:  # the first rounds warm up
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(seen) for name, seen in times.items()}


def small(name: str, plan: PhysicalPlan, rounds: int) -> None:
    """Print a line about a plan of small actors."""
    check(plan)
    fed = [{"x": torch.ones(1)} for _ in range(MICRO_BATCHES)]
    batch, direct = {"x": torch.ones(MICRO_BATCHES)}, Direct(plan, {})
    firings = sum(len(order) for part in plan.ranks for order in part.orders.values())
    with ActorRuntime(ActorConfig()).start(plan, {}, LocalBackend()) as session:
        ways = {"actors": lambda: session.step(batch, {}), "direct": lambda: direct.step(fed)}
        took_s = interleaved(ways, rounds)
    above_s = (took_s["actors"] - took_s["direct"]) / firings
    direct_s = took_s["direct"] / firings
    print(
        f"{name:22} {firings:5} firings a step: {format_seconds(above_s):>8} a firing above"
        f" {format_seconds(direct_s):>8} of direct calls",
        flush=True,
    )


def real(micro_batches: int, rounds: int) -> None:
    """Print a line about a GPT on one rank."""
    registry: Any = discover(strict=True)
    data = registry.make("data", "stdlib", {})
    model, optimizer = make_program(registry)
    micro = data.samples(range(BATCH_SIZE // micro_batches))
    graph = prepare_step(capture(model, model_loss, micro, optimizer), micro_batches)
    planner = preset_planner(registry, "manual/data_parallel")
    mesh = Placement.grid((1,), ("data",))
    plan = compile_plan(
        graph, planner.plan(PlanRequest(graph=graph, mesh=mesh, cluster=machine(1)))
    )
    states = initial_states(model, optimizer)
    batch = data.samples(range(BATCH_SIZE))
    with ActorRuntime(ActorConfig()).start(plan, states, LocalBackend()) as session:
        scalars = {"lr": LEARNING_RATE}
        fed = session.feeder.feed(batch, scalars)[0]  # type: ignore[attr-defined]
        own = {name: session.shard(name, 0) for name in session.store.values[0]}  # type: ignore[attr-defined]
        direct = Direct(plan, {name: _copy(value) for name, value in own.items()})
        ways = {
            "actors": partial(session.step, batch, scalars),
            "direct": partial(direct.step, fed),
        }
        found = session.step(batch, scalars).loss, direct.step(fed)["loss"]
        assert torch.equal(*found), "both compute the same"
        took_s = interleaved(ways, rounds)
    print(
        f"GPT, one rank, {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}: "
        f"{format_seconds(took_s['actors'])}, of direct calls {format_seconds(took_s['direct'])}: "
        f"{took_s['actors'] / took_s['direct']:.3f}",
        flush=True,
    )


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    torch.set_num_threads(1)
    for num_ranks in (1, 2):
        ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
        small(f"chain, {ranks}", chain(num_ranks), rounds)
        small(f"diamonds, {ranks}", diamonds(num_ranks), rounds)
    for micro_batches in (1, 4):
        real(micro_batches, max(5, rounds // 2))


if __name__ == "__main__":
    main()
