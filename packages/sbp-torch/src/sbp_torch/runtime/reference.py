"""The reference runtime: all ranks in lock-step in one thread, the oracle for all others.

It replays the plan's firing orders on real tensors, one instruction at a time, with no threads, no
generated code and no backend: collectives are `boxing.execute.apply_step` on all ranks at once.
Slow and simple; the setting `compile` tries out compiled segments.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import (
    LOCAL_BOX,
    Actor,
    ActorId,
    ActorKind,
    Firings,
    Instruction,
    PhysicalPlan,
    TokenGame,
    dying_keys,
    keys_out,
)
from sbp_core.errors import RunError
from sbp_core.runtime import Number, Runtime, Session, StepResult, Watch
from sbp_torch.boxing.execute import apply_step, local_step
from sbp_torch.ops.operators import bind, operator_of, results_of
from sbp_torch.runtime.accumulation import Accumulation
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.partial_update import PARTIAL_UPDATE_TODO, overwrite, partially_updated
from sbp_torch.runtime.store import StateStore, Values, feed
from sbp_torch.segments.execution import OwningSegment, segment_maker

Segments = Mapping[tuple[int, str], OwningSegment]


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
        #: Whether a step failed after it had overwritten a state.
        self.is_partially_updated = False
        #: Functions of segments by rank and actor; None to run their instructions one by one.
        self.segments: Segments | None = None
        if config.compile != "eager":
            make = segment_maker(config.compile, fallback=config.compile_fallback)
            self.segments = {
                (part.rank, actor.name): make(actor, part.rank, plan.steps)
                for part in plan.ranks
                for actor in part.actors
                if actor.kind is ActorKind.COMPUTE
            }
        self.store = StateStore(plan, [part.rank for part in plan.ranks])
        self.store.load(states)

    def step(self, batch: Mapping[str, Tensor], scalars: Mapping[str, Number]) -> StepResult:
        """See `Session.step`."""
        if self.is_partially_updated:
            raise partially_updated()
        fed = feed(self.plan, batch, scalars, self.store.values)
        with torch.no_grad(), _intra_op_threads(self.config.threads_per_rank):
            replay = _Replay(self.plan, self.store, fed, self.watch, self.segments)
            before = self.store.values
            try:
                replay.run()
                # One assignment, so that an interrupt leaves the states before it or after it.
                self.store.values = {
                    rank: held | replay.new_states.get(rank, {}) for rank, held in before.items()
                }
            finally:
                self.is_partially_updated = replay.has_overwritten and self.store.values is before
        return StepResult(outputs=replay.results)

    def shard(self, name: str, rank: int) -> Tensor | Number:
        """See `Session.shard`."""
        return self.store.values[rank][name]

    def state_dict(self) -> dict[str, Tensor]:
        """See `Session.state_dict`."""
        if self.is_partially_updated:
            raise partially_updated()
        return self.store.whole()

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.load_state_dict`."""
        self.store.load(states)
        self.is_partially_updated = False

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
        self,
        plan: PhysicalPlan,
        store: StateStore,
        fed: Mapping[int, list[Values]],
        watch: Watch,
        segments: Segments | None = None,
    ) -> None:
        self.segments = segments
        self.plan, self.store, self.fed, self.watch = plan, store, fed, watch
        self.game = TokenGame(plan)
        self.queues: dict[tuple[int, str, str], deque[Values]] = defaultdict(deque)
        for part in plan.ranks:
            for register in part.registers:
                if register.carries:
                    states = [store.values[part.rank][name] for name in register.carries]
                    for consumer in register.consumers:
                        filling = dict(zip(register.keys, states, strict=True))
                        self.queues[(part.rank, register.name, consumer)].append(filling)
        self.in_transit: dict[str, deque[dict[int, Tensor]]] = defaultdict(deque)
        self.sums: dict[ActorId, Accumulation] = {}
        self.dying: dict[tuple[int, str], tuple[tuple[str, ...], ...]] = {}
        self.results: dict[str, Tensor] = {}
        self.new_states: dict[int, Values] = defaultdict(dict)
        self.has_overwritten = False
        self.firings = Firings(plan, self.game)

    def run(self) -> None:
        if not self.firings.run(self._fire):
            heads = map(self.firings.head, self.firings.waiting())
            stuck = [f"rank {place[0]}: {place[1]}" for place in heads if place]
            raise RunError("the step came to a stand", where=stuck, todo="check the plan")

    def _fire(self, place: ActorId) -> None:
        partners = self.game.partners(place)
        taken = {partner: self._take(partner) for partner in partners}
        # Segments overwrite states while they run.
        self.has_overwritten |= any(map(self._overwrites, partners))
        try:
            results = self._results(place, taken)
        except Exception as error:
            raise RunError(
                f"rank {place[0]} failed in actor {place[1]!r}: {error}",
                todo=PARTIAL_UPDATE_TODO
                if self.has_overwritten
                else "states are those from before the step: state_dict() still gives them",
            ) from error
        for partner in partners:
            self._put(partner, results[partner])
            self.game.finish(partner)
            self.firings.advance(partner)

    def _overwrites(self, place: ActorId) -> bool:
        """Whether the actor is a segment that overwrites states."""
        actor = self.game.actor(place)
        return bool(actor.in_place) and actor.kind is ActorKind.COMPUTE

    def _results(self, place: ActorId, taken: Mapping[ActorId, Values]) -> dict[ActorId, Values]:
        """Do the work of a firing: of one actor, or of a collective on all ranks of its group."""
        actor = self.game.actor(place)
        if actor.kind is ActorKind.RECEIVE:
            return {place: self._receive(place, actor)}
        if actor.kind is not ActorKind.COLLECTIVE:
            with self.watch(place[0]):
                return {place: self._run(place, actor, taken[place])}
        shards = {rank: _only(values) for (rank, _), values in taken.items()}
        made = apply_step(self.plan.steps[actor.step], shards)
        return {partner: {actor.makes: self._own(partner[0], made)} for partner in taken}

    def _own(self, rank: int, made: Mapping[int, Tensor]) -> Tensor:
        """Return a rank's part of what a boxing step made, told from the parts of others."""
        with self.watch(rank):
            return made[rank].detach()

    def _take(self, place: ActorId) -> Values:
        """Return what an actor reads: register contents, states, batch parts, scalars."""
        rank, name = place
        index = self.game.start(place)
        values: Values = {}
        for register in self.plan.by_rank[rank].inputs_of[name]:
            filling = self.queues[(rank, register.name, name)].popleft()
            if register.carries:
                filling = dict(zip(register.carries, filling.values(), strict=True))
            values |= filling
        actor = self.game.actor(place)
        for key in actor.reads:
            if key in values:
                continue  # carried from the micro-batch before
            held = self.store.values[rank]
            values[key] = held[key] if key in held else self.fed[rank][index][key]
        return values

    def _put(self, place: ActorId, values: Values) -> None:
        """Fill registers; keep results and new states."""
        rank, name = place
        actor = self.game.actor(place)
        # An accumulation gives nothing until the last micro-batch; segments may give only a token.
        if values or actor.kind is not ActorKind.ACCUMULATE:
            for register in self.plan.by_rank[rank].outputs_of[name]:
                filling = {key: values[key] for key in register.keys}
                for consumer in register.consumers:
                    self.queues[(rank, register.name, consumer)].append(dict(filling))
            for result, key in actor.emits:
                found = values[key]
                assert isinstance(found, Tensor), f"{key} is a loss or metric"
                self.results[result] = found
            for state, key in actor.writes:
                if state in actor.in_place:
                    self.has_overwritten = True
                    overwrite(self.store.values[rank][state], values[key])
                else:
                    self.new_states[rank][state] = values[key]

    def _run(self, place: ActorId, actor: Actor, taken: Values) -> Values:
        if actor.kind is ActorKind.COMPUTE:
            return self._compute(place[0], actor, taken)
        if actor.kind is ActorKind.ACCUMULATE:
            return self._accumulate(place, actor, taken)
        assert actor.kind is ActorKind.SEND, actor.kind
        return self._send(place, actor, _only(taken))

    def _receive(self, place: ActorId, actor: Actor) -> Values:
        step = self.plan.steps[actor.step]
        shards: dict[int, Tensor] = {}
        for link in self.game.receives[place]:
            shards |= self.in_transit[link.name].popleft()
        return {actor.makes: self._own(place[0], apply_step(step, shards))}

    def _send(self, place: ActorId, actor: Actor, part: Tensor) -> Values:
        for link in self.game.sends[place]:
            self.in_transit[link.name].append({place[0]: part})
        return {}

    def _compute(self, rank: int, actor: Actor, taken: Values) -> Values:
        """Run the instructions; values die after their last use, those taken too."""
        place = (rank, actor.name)
        if self.segments is not None:
            given = [taken.pop(key) for key in (*actor.inputs, *actor.reads)]
            return dict(zip(keys_out(actor), self.segments[place](given), strict=True))
        if place not in self.dying:
            self.dying[place] = dying_keys(actor)
        for entry, dying in zip(actor.instructions, self.dying[place], strict=True):
            taken |= zip(entry.outputs, results_of(self._call(rank, entry, taken)), strict=True)
            for key in dying:
                del taken[key]
        return taken

    def _call(self, rank: int, entry: Instruction, values: Values) -> Any:
        if entry.op == LOCAL_BOX:
            source, index = entry.args
            value = values[source.name]
            assert isinstance(value, Tensor), "boxing moves tensors"
            return local_step(self.plan.steps[index], rank, value)
        args = bind(entry.args, values.__getitem__)
        kwargs = {key: bind(part, values.__getitem__) for key, part in entry.kwargs.items()}
        return operator_of(entry.op)(*args, **kwargs)

    def _accumulate(self, place: ActorId, actor: Actor, taken: Values) -> Values:
        if place not in self.sums:
            self.sums[place] = Accumulation(actor, self.plan.num_micro_batches)
        return dict(self.sums[place].add(self.game.started[place] - 1, taken))


def _only(values: Values) -> Tensor:
    (value,) = values.values()
    assert isinstance(value, Tensor), "boxing moves tensors"
    return value
