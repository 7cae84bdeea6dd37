"""The reference runtime: all ranks in lock-step in one thread, the oracle for all others.

It replays the plan's firing orders on real tensors, one instruction at a time, with no threads, no
generated code and no backend: collectives are `boxing.execute.apply_step` on all ranks at once.
Slow and simple. Knows torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing.backend import BoxingBackend
from sbp_core.boxing.execute import apply_step, local_step
from sbp_core.compile.physical import LOCAL_BOX, Actor, ActorKind, PhysicalPlan
from sbp_core.compile.tokens import Place, TokenGame
from sbp_core.errors import RunError
from sbp_core.runtime.configs import ReferenceConfig
from sbp_core.runtime.contract import Number, Runtime, Session, StepResult
from sbp_core.runtime.operators import bind, operator_of, results_of
from sbp_core.runtime.store import StateStore, Values, feed


class ReferenceRuntime(Runtime):
    """Runs every rank in the calling thread; the backend is neither opened nor used."""

    def __init__(self, config: ReferenceConfig) -> None:
        self.config = config

    def start(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor],
        backend: BoxingBackend,
        ranks: Sequence[int] | None = None,
    ) -> Session:
        """See `Runtime.start`; all ranks of the plan are here."""
        return ReferenceSession(plan, states, self.config)


def build(config: ReferenceConfig) -> ReferenceRuntime:
    """Return the runtime. Kind `runtime`, name `reference`."""
    return ReferenceRuntime(config)


class ReferenceSession(Session):
    """The states of all ranks, and the replay of one step at a time."""

    def __init__(
        self, plan: PhysicalPlan, states: Mapping[str, Tensor], config: ReferenceConfig
    ) -> None:
        self.plan, self.config = plan, config
        self.store = StateStore(plan, [part.rank for part in plan.ranks])
        self.store.load(states)

    def step(self, batch: Mapping[str, Tensor], scalars: Mapping[str, Number]) -> StepResult:
        """See `Session.step`."""
        fed = feed(self.plan, batch, scalars, self.store.values)
        with torch.no_grad(), _intra_op_threads(self.config.threads_per_rank):
            replay = _Replay(self.plan, self.store, fed)
            replay.run()
        for rank, values in replay.new_states.items():
            self.store.values[rank].update(values)
        return StepResult(outputs=replay.results)

    def shard(self, name: str, rank: int) -> Tensor | Number:
        """See `Session.shard`."""
        return self.store.values[rank][name]

    def state_dict(self) -> dict[str, Tensor]:
        """See `Session.state_dict`."""
        return self.store.whole()

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.load_state_dict`."""
        self.store.load(states)

    def close(self) -> None:
        """Nothing runs between steps."""


@contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    """Let operators use `count` threads: sums in another number of parts round otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Replay:
    """One step: the token game with tensors."""

    def __init__(
        self, plan: PhysicalPlan, store: StateStore, fed: Mapping[int, list[Values]]
    ) -> None:
        self.plan, self.store, self.fed = plan, store, fed
        self.game = TokenGame(plan)
        self.queues: dict[tuple[int, str, str], deque[Values]] = defaultdict(deque)
        self.in_transit: dict[str, deque[dict[int, Tensor]]] = defaultdict(deque)
        self.sums: dict[tuple[int, str], Tensor] = {}
        self.results: dict[str, Tensor] = {}
        self.new_states: dict[int, Values] = defaultdict(dict)
        self.orders = {
            (part.rank, thread): deque(order)
            for part in plan.ranks
            for thread, order in part.orders.items()
        }

    def run(self) -> None:
        progress = True
        while progress:
            progress = False
            for thread, order in self.orders.items():
                while order and self._can_fire((thread[0], order[0][0])):
                    self._fire((thread[0], order[0][0]))
                    progress = True
        if any(self.orders.values()):
            stuck = [f"rank {r}: {order[0][0]}" for (r, _), order in self.orders.items() if order]
            raise RunError("the step came to a stand", where=stuck, todo="check the plan")

    def _order(self, place: Place) -> deque[tuple[str, int]]:
        return self.orders[(place[0], self.game.actor(place).thread)]

    def _can_fire(self, place: Place) -> bool:
        return all(
            (order := self._order(partner))
            and order[0][0] == partner[1]
            and self.game.is_ready(partner)
            for partner in self.game.partners(place)
        )

    def _fire(self, place: Place) -> None:
        partners = self.game.partners(place)
        taken = {partner: self._take(partner) for partner in partners}
        try:
            results = self._results(place, taken)
        except Exception as error:
            raise RunError(
                f"rank {place[0]} failed in actor {place[1]!r}: {error}",
                todo="states are those from before the step: state_dict() still gives them",
            ) from error
        for partner in partners:
            self._put(partner, results[partner])
            self.game.finish(partner)
            self._order(partner).popleft()

    def _results(self, place: Place, taken: Mapping[Place, Values]) -> dict[Place, Values]:
        """Do the work of a firing: of one actor, or of a collective on all ranks of its group."""
        actor = self.game.actor(place)
        if actor.kind is not ActorKind.COLLECTIVE:
            return {place: self._run(place, actor, taken[place])}
        shards = {rank: _only(values) for (rank, _), values in taken.items()}
        made = apply_step(self.plan.steps[actor.step], shards)
        return {partner: {actor.makes: made[partner[0]]} for partner in taken}

    def _take(self, place: Place) -> Values:
        """Return what an actor reads: register contents, states, batch parts, scalars."""
        rank, name = place
        index = self.game.start(place)
        values: Values = {}
        for register in self.plan.by_rank[rank].inputs_of[name]:
            values |= self.queues[(rank, register.name, name)].popleft()
        actor = self.game.actor(place)
        for key in actor.reads:
            held = self.store.values[rank]
            values[key] = held[key] if key in held else self.fed[rank][index][key]
        return values

    def _put(self, place: Place, values: Values) -> None:
        """Fill registers; keep results and new states."""
        rank, name = place
        actor = self.game.actor(place)
        if values:
            for register in self.plan.by_rank[rank].outputs_of[name]:
                filling = {key: values[key] for key in register.keys}
                for consumer in register.consumers:
                    self.queues[(rank, register.name, consumer)].append(dict(filling))
            for result, key in actor.emits:
                found = values[key]
                assert isinstance(found, Tensor), f"{key} is a loss or metric"
                self.results[result] = found
            for state, key in actor.writes:
                self.new_states[rank][state] = values[key]

    def _run(self, place: Place, actor: Actor, taken: Values) -> Values:
        if actor.kind is ActorKind.COMPUTE:
            return self._compute(place[0], actor, taken)
        if actor.kind is ActorKind.ACCUMULATE:
            return self._accumulate(place, actor, taken)
        step = self.plan.steps[actor.step]
        if actor.kind is ActorKind.SEND:
            return self._send(place, actor, _only(taken))
        assert actor.kind is ActorKind.RECEIVE, actor.kind
        shards: dict[int, Tensor] = {}
        for link in self.game.receives[place]:
            shards |= self.in_transit[link.name].popleft()
        return {actor.makes: apply_step(step, shards)[place[0]]}

    def _send(self, place: Place, actor: Actor, part: Tensor) -> Values:
        for link in self.game.sends[place]:
            self.in_transit[link.name].append({place[0]: part})
        return {}

    def _compute(self, rank: int, actor: Actor, taken: Values) -> Values:
        values: dict[str, Any] = dict(taken)
        for entry in actor.instructions:
            if entry.op == LOCAL_BOX:
                source, index = entry.args
                made = local_step(self.plan.steps[index], rank, values[source.name])
            else:
                args = bind(entry.args, values.__getitem__)
                kwargs = {k: bind(v, values.__getitem__) for k, v in entry.kwargs.items()}
                made = operator_of(entry.op)(*args, **kwargs)
            values |= zip(entry.outputs, results_of(made), strict=True)
        return values

    def _accumulate(self, place: Place, actor: Actor, taken: Values) -> Values:
        last = self.game.started[place] == self.plan.num_micro_batches
        for part, total, scale in actor.accumulates:
            value = taken[part]
            assert isinstance(value, Tensor), f"{part} is summed"
            key = (place[0], total)
            self.sums[key] = self.sums[key] + value * scale if key in self.sums else value * scale
        if not last:
            return {}
        return {total: self.sums.pop((place[0], total)) for _, total, _ in actor.accumulates}


def _only(values: Values) -> Tensor:
    (value,) = values.values()
    assert isinstance(value, Tensor), "boxing moves tensors"
    return value
