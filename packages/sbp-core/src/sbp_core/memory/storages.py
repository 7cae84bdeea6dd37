"""Replay one rank of a plan without data, to find when each storage is allocated and freed.

`lifetime` decides which plan is replayed and in which order; a `ledger` keeps holders and purposes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from sbp_core.boxing.slices import (
    Bounds,
    bounds_of,
    local_transition,
    overlap,
    transfer_pieces,
    volume,
)
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    ActorId,
    Collective,
    Compute,
    Instruction,
    Receive,
    Send,
    keys_in,
)
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.graph.ir import InputKind
from sbp_core.graph.primitives import STACK, TO_HOST
from sbp_core.interpreter import Firing, InstructionDomain, Interpreter
from sbp_core.memory.ledger import Buffer, Ledger, RecordedFiring, arguments_of
from sbp_core.memory.memory_kinds import (
    MemoryKind,
    kind_of_slot,
    kinds_of_keys,
    module_of_node,
    module_of_slot,
)
from sbp_core.memory.rank_events import Events
from sbp_core.memory.storage_view import (
    CallLayouts,
    ResultLayout,
    StorageView,
    StridedLayout,
    Value,
    contiguous,
    first_addend,
    grown_stack,
    number_of,
    placed,
)

Values = dict[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLifetimes:
    """The storages of one rank over a step.

    Args:
        rank: The rank.
        buffers: The storages in device memory, in the order in which they are made.
        host_buffers: The storages in host memory, in the same order.
        ticks: For each tick, the actor, the index of its firing, and the node it is in.
    """

    rank: int
    buffers: tuple[Buffer, ...]
    ticks: tuple[tuple[str, int, str], ...]
    host_buffers: tuple[Buffer, ...] = ()


class RankReplay:
    """Replays of one rank.

    Args:
        folded: The folded plan: one rank for each class of equal ranks.
        like: The rank of the same class in the folded plan.
        part: The plan of the rank.
        layouts: Computes the memory layout of results.
    """

    def __init__(
        self, folded: PhysicalPlan, like: int, part: RankPlan, layouts: CallLayouts
    ) -> None:
        self._like, self._part, self._layouts = like, part, layouts
        self._kinds = kinds_of_keys(folded, part)
        self._known = _Known()
        links = (
            replace(one, sender=self._own(one.sender), receiver=self._own(one.receiver))
            for one in folded.links
            if like in (one.sender[0], one.receiver[0])
        )
        self._plan = replace(folded, ranks=(part,), links=tuple(links))

    def run(self, events: Events, moved: Mapping[str, StorageView]) -> _Storages:
        """Return the storages of the rank over a step.

        Args:
            events: The events of the rank `like`, in their order.
            moved: The layouts of the first states that are not contiguous, by name.
        """
        rank = self._part.rank
        domain = _Storages(self._plan, self._part, self._layouts, self._kinds, self._known, moved)
        held = domain.rank
        replay = Interpreter(self._plan, domain, {rank: held.states}, {rank: held.fed})
        replay.run_rank(rank, map(self._own, events))
        held.ledger.finish()
        return domain

    def _own(self, actor_id: ActorId) -> ActorId:
        """Return the rank's own actor for an actor of the rank `like`."""
        return (self._part.rank, actor_id[1]) if actor_id[0] == self._like else actor_id


@dataclass(slots=True)
class _Rank:
    """The values that one rank holds outside of registers."""

    part: RankPlan
    ledger: Ledger
    states: Values = field(default_factory=dict)
    fed: list[Values] = field(default_factory=list)
    writes: Values = field(default_factory=dict)
    emits: Values = field(default_factory=dict)
    ticks: list[tuple[str, int, str]] = field(default_factory=list)

    def tick(self, firing: Firing[Actor], node: str) -> None:
        """Advance to an instruction or boxing step."""
        self.ledger.tick()
        self.ticks.append((firing.actor.name, firing.index, node))

    def put(self, where: Values, name: str, value: Value) -> None:
        """Replace the value of a name."""
        # First hold the new value, because the old one may be in the same storage.
        self.ledger.hold(value)
        if name in where:
            self.ledger.drop(where[name])
        where[name] = value


@dataclass(frozen=True, slots=True)
class _Known:
    """The effects of earlier firings, which are repeated if the arguments have the same layout.

    Args:
        segments: For each computing actor, its firings with different argument layouts.
        boxed: For each boxing actor, from its last firing: the layout of the shard, the layout of
            the result, and whether the result was a piece of the shard.
    """

    segments: dict[ActorId, list[RecordedFiring]] = field(default_factory=lambda: defaultdict(list))
    boxed: dict[ActorId, tuple[StridedLayout | None, StridedLayout, bool]] = field(
        default_factory=dict
    )


class _Storages(InstructionDomain[Value]):
    """The domain of a replay of one rank whose values are tensors in numbered storages."""

    def __init__(
        self,
        plan: PhysicalPlan,
        part: RankPlan,
        layouts: CallLayouts,
        kinds: Mapping[str, MemoryKind],
        known: _Known,
        moved: Mapping[str, StorageView],
    ) -> None:
        super().__init__()
        self.plan, self.layouts, self.known = plan, layouts, known
        # The rank as it begins a step: states, parts of the batch, scalars.
        ledger = Ledger(kinds)
        self.rank = rank = _Rank(part, ledger, fed=[{} for _ in range(plan.num_micro_batches)])
        shared: dict[int, StorageView] = {}
        for slot in part.slots:
            kind = InputKind(slot.kind)
            # A state exists once, a part of the batch for each micro-batch.
            homes = [rank.states] if kind.is_state else rank.fed
            for home in homes:
                if slot.sbp is None:
                    home[slot.name] = number_of(slot)
                    continue
                # In a second replay, the states have the layout that the first replay gave them.
                layout = contiguous(slot.local_shape, slot.dtype)
                view = moved.get(slot.name, StorageView(layout, -1, layout.size_bytes))
                if view.storage in shared:
                    home[slot.name] = replace(shared[view.storage], layout=view.layout)
                else:
                    made = home[slot.name] = ledger.new(
                        slot.name,
                        view.layout,
                        view.storage_bytes,
                        kind=kind_of_slot(slot.kind),
                        module=module_of_slot(slot.name, slot.kind),
                        on_host=slot.offloaded,
                    )
                    if view.storage >= 0:
                        shared[view.storage] = made
                ledger.hold(home[slot.name])
        rank.ticks.append(("", 0, ""))

    def found(self) -> RankLifetimes:
        """Return the lifetimes."""
        rank = self.rank
        buffers = rank.ledger.buffers
        return RankLifetimes(
            rank=rank.part.rank,
            buffers=tuple(one for one in buffers if not one.on_host),
            ticks=tuple(rank.ticks),
            host_buffers=tuple(one for one in buffers if one.on_host),
        )

    def moved_states(self) -> dict[str, StorageView]:
        """Return the layout and storage of new states that differ in layout from the old ones.

        Several may be in one storage, such as parameters that were gathered together.
        """
        return {
            state: value
            for state, value in self.rank.writes.items()
            if isinstance(value, StorageView)
            and isinstance(old := self.rank.states[state], StorageView)
            and (value.layout, value.storage_bytes) != (old.layout, old.storage_bytes)
        }

    # Holders.

    def hold(self, rank: int, value: Value) -> None:
        """See `Domain.hold`."""
        self.rank.ledger.hold(value)

    def keep(self, rank: int, value: Value) -> None:
        """See `Domain.keep`: a value that passes from one firing to another is not a temporary."""
        ledger = self.rank.ledger
        ledger.hold(value)
        ledger.crosses(value)

    def drop(self, rank: int, value: Value) -> None:
        """See `Domain.drop`."""
        self.rank.ledger.drop(value)

    def emit(self, firing: Firing[Actor], result: str, value: Value) -> None:
        """See `Domain.emit`."""
        rank = self.rank
        rank.put(rank.emits, result, value)

    def write(self, firing: Firing[Actor], state: str, value: Value) -> None:
        """See `Domain.write`: a value that is copied over the old one dies like any other value."""
        if state not in firing.actor.in_place:
            rank = self.rank
            rank.put(rank.writes, state, value)

    # The work of firings.

    def compute(self, firing: Firing[Compute], taken: Values) -> Values:
        """See `Domain.compute`; a firing whose arguments have a known layout is repeated."""
        rank, known = self.rank, self.known.segments[firing.id]
        arguments, storages = arguments_of(taken)
        done = next((one for one in known if one.arguments == arguments), None)
        if done is None:
            ledger, values = rank.ledger.begin(taken)
            # It replaces the rank's own ledger and ticks while the segment is executed.
            self.rank = apart = _Rank(rank.part, ledger)
            made = super().compute(firing, values)
            self.rank = rank
            done = ledger.recorded(taken, [node for _, _, node in apart.ticks], made)
            known.append(done)
        rank.ticks += [(firing.actor.name, firing.index, node) for node in done.nodes]
        return rank.ledger.repeat(done, storages)

    def call(
        self, firing: Firing[Compute], instruction: Instruction, values: Values
    ) -> tuple[Value, ...]:
        """Return the results of an instruction, in storages of its arguments or new ones."""
        rank = self.rank
        rank.tick(firing, instruction.node)
        return self._made(rank, instruction, values)

    def _made(self, rank: _Rank, entry: Instruction, values: Values) -> tuple[Value, ...]:
        found = self.layouts.call(entry, rank.part.rank, values.__getitem__, self.plan.steps)

        def new(number: int, made: ResultLayout) -> StorageView:
            return rank.ledger.new(
                entry.outputs[number],
                made.layout,
                made.storage_bytes,
                module=module_of_node(entry.node),
                on_host=entry.op == TO_HOST,
            )

        results = placed(found, [values[key] for key in keys_in(entry)], new)
        for key, value in zip(entry.outputs, results, strict=True):
            rank.ledger.name(key, value)
        return tuple(results)

    def add(
        self,
        firing: Firing[Accumulate],
        term: tuple[str, str, float | str | None],
        total: Value | None,
        part: Value,
    ) -> Value:
        """See `Domain.add`: the first part is scaled or copied, later ones are added in place.

        A stack is copied with each part.
        """
        (source, key, how), rank = term, self.rank
        rank.tick(firing, key)
        # How to combine parts: None takes the last one, a text is max or min, a number scales.
        if how is None:
            return part
        values = {source: part}
        if total is None:
            entries: tuple[Instruction, ...] = (first_addend(source, key, how),)
        elif how == STACK:
            values[key], entries = total, grown_stack(source, key)
        else:
            return total
        for entry in entries:
            values |= zip(entry.outputs, self._made(rank, entry, values), strict=True)
        return values[key]

    def collective(
        self, firings: Sequence[Firing[Collective]], shards: Mapping[int, Value]
    ) -> dict[int, Value]:
        """See `Domain.collective`."""
        return {firing.rank: self._boxed(firing, shards[firing.rank]) for firing in firings}

    def send(self, firing: Firing[Send], shard: Value) -> None:
        """See `Domain.send`."""
        assert isinstance(shard, StorageView), "boxing moves tensors"
        self.rank.tick(firing, firing.actor.name)

    def receive(self, firing: Firing[Receive], shards: Mapping[int, Value]) -> Value:
        """See `Domain.receive`."""
        return self._boxed(firing, shards.get(firing.rank))

    def _boxed(self, firing: Firing[Collective | Receive], own: Value | None) -> Value:
        """Return the part that a boxing step gives a rank: its own shard, or a new storage."""
        rank, actor = self.rank, firing.actor
        rank.tick(firing, actor.name)
        lies = own.layout if isinstance(own, StorageView) else None
        known = self.known.boxed.get(firing.id)
        if known is None or known[0] != lies:
            step = self.plan.steps[actor.step]
            known = self.known.boxed[firing.id] = lies, *_boxed_layout(step, firing.rank, lies)
        _, layout, is_piece = known
        if isinstance(own, StorageView) and is_piece:
            made = replace(own, layout=layout)
        else:
            module = module_of_node(actor.makes.split("@", 1)[0])
            made = rank.ledger.new(actor.makes, layout, layout.size_bytes, module=module)
        rank.ledger.name(actor.makes, made)
        return made


def _boxed_layout(
    step: BoxingStep, rank: int, own: StridedLayout | None
) -> tuple[StridedLayout, bool]:
    """Return the layout of a rank's part after a step, and whether it is a piece of its shard."""
    bounds = bounds_of(step.shape, *step.target)[rank]
    shape = tuple(stop - start for start, stop in bounds)
    # Backends do not copy a single contiguous piece: if the result of a rank is a piece of its own
    # shard, it is a view, which keeps the whole storage.
    kept: StridedLayout | None = None
    if own is not None and step.kind is StepKind.ALL_REDUCE:
        kept = own if len(step.group(rank)) == 1 else None  # nothing to add to
    elif own is not None and (piece := own_piece(step, rank)) is not None:
        first = sum(start * stride for (start, _), stride in zip(piece, own.strides, strict=True))
        extents = tuple(stop - start for start, stop in piece)
        kept = StridedLayout(extents, own.strides, own.offset + first, own.dtype)
    if kept is not None and kept.shape == shape and kept.is_contiguous:
        return kept, True
    return contiguous(shape, step.dtype), False


def own_piece(step: BoxingStep, rank: int) -> Bounds | None:
    """Return the slice of a rank's own shard that is its whole result of the step, if there is one.

    No new storage is made for it.

    Args:
        step: A step that moves slices: no all-reduce.
        rank: A rank of the placement before the step, after it, or both.
    """
    # Several pieces are joined in a new storage, and a received piece has a new one anyway.
    if step.kind is StepKind.TRANSFER:
        return _kept_in_transfer(step).get(rank)
    held, wanted = (bounds_of(step.shape, *end) for end in (step.source, step.target))
    # Most ranks receive something from another one, so the search ends early.
    if any(other != rank and overlap(held[other], wanted[rank]) for other in step.group(rank)):
        return None
    kept, _ = local_transition(step, rank)
    return kept if volume(kept) else None


@lru_cache(maxsize=64)
def _kept_in_transfer(step: BoxingStep) -> Mapping[int, Bounds]:
    """Return the result of `own_piece` by rank, computed once for all ranks of a step."""
    (before, _), (after, _) = step.source, step.target
    if not set(before.rank_list) & set(after.rank_list):
        return {}  # from stage to stage
    found: dict[int, list[Bounds | None]] = {}
    for piece in transfer_pieces(step):
        own = piece.source if piece.sender == piece.receiver else None
        found.setdefault(piece.receiver, []).append(own)
    return {rank: own for rank, (own, *more) in found.items() if own is not None and not more}
