"""Which results of a rank's segments lie in its arena, where, and how they get there. No torch.

In the arena lies what one thread makes and uses alone, in a fixed order: nothing that leaves the
step, crosses threads, or is handed to a boxing step (but see `Boxing`). Its lifetime is then known
whatever other threads and ranks do, so no credit need be waited for to write over it.

    before: v3 = aten_mm_default(v0, v1)      a new tensor in each step
            v4 = aten_t_default(v3)
            v5 = aten_relu_default(v4)
    after:  aten_mm_out(v0, v1, out=s0)       s0, s1, s2: views of the arena, made once
            aten_relu_out(s1, out=s2)         s1 = t(s0); s2 at the place of s0, which dies here

An elementwise operator writes over an argument that dies with it and lies as the result does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sbp_core.boxing.step import Step, StepKind
from sbp_core.compile.liveness import keys_in
from sbp_core.compile.physical import Actor, ActorKind, Instruction, PhysicalPlan
from sbp_core.memory.ledger import Buffer
from sbp_core.memory.lifetime import RankLifetimes, Values
from sbp_core.memory.offsets import Interval, Packing, pack
from sbp_core.memory.storage_view import Placed, Strided, contiguous_strides

#: Operators that copy one tensor: (source argument first), written as a copy into the arena.
_COPIES = frozenset({"aten.clone.default", "aten._to_copy.default", "aten.reshape.default"})

_REDUCING = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutVariant:
    """How an operator writes into tensors that it is given.

    Args:
        op: Name of the overload, such as `aten.gelu_backward.grad_input`.
        outs: Names of the arguments to write into, one for each result.
        elementwise: Whether it may write over an argument that lies as the result does.
    """

    op: str
    outs: tuple[str, ...]
    elementwise: bool


class Slot(NamedTuple):
    """A view of the arena: where its storage begins, in bytes, and how it lies there."""

    offset: int
    lies: Strided


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """How one instruction writes into the arena.

    Args:
        variant: Its form with places to write to; None for a copy.
        slots: Index of the view of each result.
        source: Of a copy, index of the view that lies as the argument does.
    """

    variant: OutVariant | None
    slots: tuple[int, ...]
    source: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSlots:
    """The views that one segment writes and reads, the same in number for each firing.

    Args:
        writes: By index of the instruction.
        views: Instructions that only look at the arena, which are left out: by their index, the
            slots of their results.
        firings: For each firing the views, by slot.
    """

    writes: Mapping[int, Write]
    views: Mapping[int, tuple[int, ...]]
    firings: tuple[tuple[Slot, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlots:
    """What lies in the arena of one rank.

    Args:
        size_bytes: Of the arena.
        packing: How full it is.
        segments: By name of the actor; those that have nothing there are left out.
        inside: Indices of the buffers (`RankLifetimes.buffers`) that lie there.
        largest_bytes: Of these buffers.
        reads_at_once: What was assumed; see `rank_slots`.
    """

    size_bytes: int
    packing: Packing
    segments: Mapping[str, SegmentSlots]
    inside: frozenset[int]
    largest_bytes: int
    reads_at_once: bool


def rank_slots(
    plan: PhysicalPlan,
    lifetimes: RankLifetimes,
    variant_of: Callable[[str], OutVariant | None],
    *,
    reads_at_once: bool,
) -> RankSlots:
    """Decide what lies in the arena of a rank, and where.

    Args:
        plan: The plan.
        lifetimes: Of the rank.
        variant_of: Says how an operator writes into given tensors, if it does.
        reads_at_once: Whether the boxing backend is through with a shard that it reduces when a
            collective returns, on whichever rank; so it is where ranks are threads.
    """
    return _Chooser(plan, lifetimes, variant_of, reads_at_once).run()


class _Chooser:
    """The state of one decision."""

    def __init__(
        self,
        plan: PhysicalPlan,
        lifetimes: RankLifetimes,
        variant_of: Callable[[str], OutVariant | None],
        reads_at_once: bool,
    ) -> None:
        self.plan, self.lifetimes, self.variant_of = plan, lifetimes, variant_of
        self.part = plan.by_rank[lifetimes.rank]
        self.reads_at_once = reads_at_once
        self.buffers = lifetimes.buffers
        self.actors = [a for a in self.part.actors if a.kind is ActorKind.COMPUTE]
        #: Buffers that write over another one, and which; and those that are written over.
        self.over: dict[int, int] = {}
        self.taken: set[int] = set()

    def run(self) -> RankSlots:
        writers = {actor.name: self._writers(actor) for actor in self.actors}
        inside = self._inside(writers)
        for actor in self.actors:
            for firing in range(self._num_firings(actor)):
                self._write_over(actor, firing, writers[actor.name], inside)
        offsets, packing = self._offsets(inside)
        segments = {}
        for actor in self.actors:
            found = self._segment(actor, writers[actor.name], offsets)
            if found is not None:
                segments[actor.name] = found
        return RankSlots(
            size_bytes=packing.size_bytes,
            packing=packing,
            segments=segments,
            inside=frozenset(offsets),
            largest_bytes=max((self.buffers[at].size_bytes for at in offsets), default=0),
            reads_at_once=self.reads_at_once,
        )

    def _num_firings(self, actor: Actor) -> int:
        return actor.num_firings(self.plan.num_micro_batches)

    def _values(self, actor: Actor, firing: int) -> Values:
        return dict(self.lifetimes.values[(actor.name, firing)])

    # Which instructions can write.

    def _writers(self, actor: Actor) -> dict[int, OutVariant | None]:
        """Return the instructions that can write all their results: how, None for a copy."""
        firings = [self._values(actor, index) for index in range(self._num_firings(actor))]
        found: dict[int, OutVariant | None] = {}
        for index, entry in enumerate(actor.instructions):
            variant = self.variant_of(entry.op)
            copies = entry.op in _COPIES
            if variant is None and not copies:
                continue
            if variant is not None and len(variant.outs) != len(entry.outputs):
                continue
            if all(self._can_write(actor, entry, values, at) for at, values in enumerate(firings)):
                found[index] = variant
        return found

    def _can_write(self, actor: Actor, entry: Instruction, values: Values, firing: int) -> bool:
        """Whether every result of an instruction is a new, dense storage that stays here."""
        storages = set()
        for key in entry.outputs:
            value = values[key]
            if not isinstance(value, Placed):
                return False
            buffer = self.buffers[value.storage]
            # Looking at what another instruction made is no writing.
            mine = buffer.name == key and buffer.maker == (actor.name, firing)
            dense = value.lies.offset == 0 and value.lies.size_bytes == value.storage_bytes
            if not (mine and dense and self._stays(buffer)):
                return False
            storages.add(value.storage)
        return len(storages) == len(entry.outputs)

    def _stays(self, buffer: Buffer) -> bool:
        """Whether only the thread that made a buffer uses it, within the step."""
        boxed = all(self._is_read_at_once(self.part.by_name[name]) for name in buffer.boxed)
        return bool(buffer.size_bytes and not buffer.leaves and boxed and len(buffer.threads) == 1)

    def _is_read_at_once(self, actor: Actor) -> bool:
        """Whether nobody reads or shares a boxing actor's argument when its firing is over."""
        if not self.reads_at_once or actor.kind is not ActorKind.COLLECTIVE:
            return False
        step: Step = self.plan.steps[actor.step]
        return step.kind in _REDUCING and len(step.group(self.part.rank)) > 1

    def _inside(self, writers: Mapping[str, Mapping[int, OutVariant | None]]) -> set[int]:
        """Return the buffers that instructions write."""
        inside = set()
        for actor in self.actors:
            for firing in range(self._num_firings(actor)):
                values = self.lifetimes.values[(actor.name, firing)]
                for index in writers[actor.name]:
                    for key in actor.instructions[index].outputs:
                        value = values[key]
                        assert isinstance(value, Placed), key
                        inside.add(value.storage)
        return inside

    # Writing over arguments that die.

    def _write_over(
        self,
        actor: Actor,
        firing: int,
        writers: Mapping[int, OutVariant | None],
        inside: set[int],
    ) -> None:
        values = self.lifetimes.values[(actor.name, firing)]
        for index, variant in writers.items():
            if variant is None or not variant.elementwise or len(variant.outs) != 1:
                continue
            entry = actor.instructions[index]
            result = values[entry.outputs[0]]
            assert isinstance(result, Placed), entry.outputs
            given = [values[key] for key in keys_in(entry)]
            for value in given:
                if isinstance(value, Placed) and self._dies(value, result, given, inside):
                    self.over[result.storage] = value.storage
                    self.taken.add(value.storage)
                    break

    def _dies(
        self, value: Placed, result: Placed, given: Sequence[object], inside: set[int]
    ) -> bool:
        """Whether a result may be written over an argument: it ends here and lies alike."""
        return (
            value.storage in inside
            and value.storage not in self.taken
            and self.buffers[value.storage].end == self.buffers[result.storage].start
            and value.lies == result.lies
            and value.storage_bytes == result.storage_bytes
            and all(
                other.lies == value.lies
                for other in given
                if isinstance(other, Placed) and other.storage == value.storage
            )
        )

    # Offsets.

    def _offsets(self, inside: set[int]) -> tuple[dict[int, int], Packing]:
        """Return the offset of every buffer; those that write over others share their place."""
        root: dict[int, int] = {}
        for storage in sorted(inside, key=lambda at: self.buffers[at].start):
            over = self.over.get(storage)
            root[storage] = storage if over is None else root[over]
        ends: dict[int, int] = defaultdict(int)
        for storage, first in root.items():
            ends[first] = max(ends[first], self.buffers[storage].end)
        firsts = sorted(ends)
        packing = pack(
            [
                Interval(self.buffers[at].size_bytes, self.buffers[at].start, ends[at])
                for at in firsts
            ]
        )
        places = dict(zip(firsts, packing.offsets, strict=True))
        return {storage: places[first] for storage, first in root.items()}, packing

    # What segments need.

    def _segment(
        self,
        actor: Actor,
        writers: Mapping[int, OutVariant | None],
        offsets: Mapping[int, int],
    ) -> SegmentSlots | None:
        """Return the views of a segment, None if it has none."""
        keys: dict[str, int] = {}
        sources: dict[str, int] = {}
        writes: dict[int, Write] = {}
        views: dict[int, tuple[int, ...]] = {}
        firings = [self.lifetimes.values[(actor.name, i)] for i in range(self._num_firings(actor))]
        for index, entry in enumerate(actor.instructions):
            looks = index not in writers and all(
                self._looks(key, firings, offsets) for key in entry.outputs
            )
            if index not in writers and not looks:
                continue
            slots = tuple(keys.setdefault(key, len(keys)) for key in entry.outputs)
            if looks:
                views[index] = slots
                continue
            writes[index] = Write(variant=writers[index], slots=slots)
            if writers[index] is None:
                sources[entry.outputs[0]] = index
        if not keys:
            return None
        for key, index in sources.items():
            source = len(keys) + list(sources).index(key)
            writes[index] = Write(variant=None, slots=writes[index].slots, source=source)
        tables = []
        for values in firings:
            table = [self._slot(values[key], offsets) for key in keys]
            copies = (actor.instructions[index] for index in sources.values())
            table += [self._as_source(entry, values, offsets) for entry in copies]
            tables.append(tuple(table))
        return SegmentSlots(writes=writes, views=views, firings=tuple(tables))

    def _looks(
        self, key: str, firings: Sequence[Mapping[str, object]], offsets: Mapping[int, int]
    ) -> bool:
        """Whether a key is a view of the arena in every firing."""
        return all(
            isinstance(value := values[key], Placed) and value.storage in offsets
            for values in firings
        )

    def _slot(self, value: object, offsets: Mapping[int, int]) -> Slot:
        assert isinstance(value, Placed), value
        return Slot(offsets[value.storage], value.lies)

    def _as_source(
        self, entry: Instruction, values: Mapping[str, object], offsets: Mapping[int, int]
    ) -> Slot:
        """Return the place of a copy as its argument's shape: what a reshape then looks at."""
        source, made = values[keys_in(entry)[0]], values[entry.outputs[0]]
        assert isinstance(source, Placed) and isinstance(made, Placed), entry.op
        lies = made.lies
        if source.lies.shape != lies.shape:
            shape = source.lies.shape
            lies = Strided(shape, contiguous_strides(shape), lies.offset, lies.dtype)
        return Slot(offsets[made.storage], lies)
