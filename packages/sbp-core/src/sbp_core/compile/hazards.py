"""Prove that a plan overwrites no state before its old value has been read (`sbp_core.check`).

`Actor.in_place` is an optimisation: the results of a step must not depend on it. So wherever a
state is overwritten on a rank, every other use of its memory with the old value, which

    reads the state, or a view of it that came by a register        on the same rank
    boxes it, or takes a result of its boxing                       on any rank

ends before the overwriting actor begins (`happens_before`). Inside that actor the same holds
instruction by instruction. And the values that outlive the step, results and states that are put in
force after it, are in no memory that is overwritten: the next step would change them.

    optimizer.0.0      t = view(w); n = norm(t); a = mul_(w, ..); b = neg(a)      t before mul_ only

Threads of one process pass values to each other without a copy. So a result of boxing may be in the
memory of any shard that it is made of, on any rank.

A state that is never boxed is checked on its own rank alone, and for one rank of each class,
because all ranks of a class do the same (`symmetry`). Only the memory of boxed states is followed
through all ranks.

One step stands for all: a step begins on the ranks of a process when all of them have finished the
step before, and processes share no memory, because they send copies. So every reader of a new value
has read it before the next step overwrites it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

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
    keys_out,
)
from sbp_core.compile.dataflow import may_be_view
from sbp_core.compile.happens_before import Clock, HappensBefore
from sbp_core.compile.overwriting import is_in_place, written_keys
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.compile.symmetry import FoldedPlan
from sbp_core.errors import PlanError
from sbp_core.graph.ir import refs


def verify_overwriting(plan: PhysicalPlan, folded: FoldedPlan, firings: Sequence[ActorId]) -> None:
    """Prove that no actor uses a state when it is overwritten, or expects the old value later.

    Args:
        plan: A plan that `plan_spec` accepts and that comes to its end.
        folded: The same plan, of one rank of each class.
        firings: All firings of a step of the folded plan, in a possible order; the firings of a
            collective after each other.

    Raises:
        PlanError: names the actor that overwrites a state, and the actor that uses it.
    """
    few = folded.plan
    if not any(actor.in_place for part in few.ranks for actor in part.actors):
        return
    order = list(dict.fromkeys(firings))
    lookers = _Lookers(few, folded.stands_for)
    lookers.look(order)
    states = lookers.states
    boxed = {name for name, state in states.items() if state.boxed or state.after.boxed}
    apart = [state for name, state in states.items() if name not in boxed]
    if apart:
        writers = {state.writer for state in apart}
        own = HappensBefore(few, folded, firings, writers, alone=True)
        for state in apart:
            _verify(state, own)
    if not boxed:
        return
    touching = _Lookers(few, folded.stands_for, boxed)
    touching.look(order)
    members = {(one, name) for rank, name in boxed for one in folded.members[rank]}
    whole = _Lookers(plan, {}, members)
    whole.look(folded.unfolded([one for one in order if one in touching.touch]))
    writers = {state.writer for state in whole.states.values()}
    before = HappensBefore(plan, folded, firings, writers)
    for state in whole.states.values():
        _verify(state, before)


def _verify(state: _State, before: HappensBefore) -> None:
    """Check that all uses of a state have ended when it is overwritten.

    Raises:
        PlanError: names a use that has not ended.
    """
    for memory in state.after.reached():
        for actor_id, what in memory.leaves:
            raise _outlives(state, actor_id, what)
    clock = before.clock(state.writer)
    for memory in state.reached():
        for actor_id, what in memory.leaves:
            raise _outlives(state, actor_id, what)
        for actor_id, last in memory.late(before, clock):
            if actor_id != state.writer or last >= state.at:
                raise _too_late(state, actor_id)


#: An actor that uses memory, and the number of its last instruction that does.
_Looker = tuple[ActorId, int]


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of some states as it is before they are overwritten, or after.

    Args:
        lookers: The actors that use it.
        leaves: Results and states that are in it after the step, with the actors that make them.
        boxed: Memory of boxing results that are made from it, and may be in it.
    """

    lookers: list[_Looker] = field(default_factory=list)
    leaves: list[tuple[ActorId, str]] = field(default_factory=list)
    boxed: list[_Memory] = field(default_factory=list)
    _checked: tuple[Clock, list[_Looker]] | None = None

    def reached(self) -> Iterator[_Memory]:
        """Yield it, and all memory that boxing may share with it."""
        met, todo = {id(self)}, [self]
        while todo:
            yield (one := todo.pop())
            new = [other for other in one.boxed if id(other) not in met]
            met.update(map(id, new))
            todo += new

    def late(self, before: HappensBefore, clock: Clock) -> list[_Looker]:
        """Return the uses of it that may not have ended at a clock."""
        # After a commit all ranks know the same of each other, so this is computed once a commit: a
        # use that has ended for all ranks has ended for each.
        if self._checked is None or self._checked[0].others is not clock.others:
            known = Clock(clock.others, 0, ())
            self._checked = (
                clock,
                [one for one in self.lookers if not before.is_over(one[0], known)],
            )
        return [one for one in self._checked[1] if not before.is_over(one[0], clock)]


@dataclass(slots=True, eq=False)
class _State(_Memory):
    """The memory of one state of one rank before it is overwritten.

    Args:
        name: Name of the state.
        writer: The actor that overwrites it.
        at: The number of the instruction that does so first.
        after: Its memory from then on.
    """

    name: str = ""
    writer: ActorId = (0, "")
    at: int = 0
    after: _Memory = field(default_factory=_Memory)


#: For each key that is in overwritten memory: that memory.
_Places = Mapping[str, frozenset[_Memory]]


class _Lookers:
    """The uses of the memory of overwritten states.

    Attributes:
        states: The overwritten states, by rank and name.
        touch: The actors that use their memory, or make a value that may be in it.

    Args:
        plan: See `verify_overwriting`; or one rank of each class of it.
        stands_for: With one rank of each class: the representative of each rank.
        wanted: The states, by rank and name; None for all.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        stands_for: Mapping[int, int],
        wanted: Collection[tuple[int, str]] | None = None,
    ) -> None:
        self.plan, self._stands_for = plan, stands_for
        self.states = {
            (part.rank, name): _State(name=name, writer=(part.rank, actor.name))
            for part in plan.ranks
            for actor in part.actors
            for name in actor.in_place
            if wanted is None or (part.rank, name) in wanted
        }
        self.touch: set[ActorId] = set()
        #: Memory of the values that actors put into registers, by rank, actor and key.
        self._made: dict[tuple[int, str, str], frozenset[_Memory]] = {}
        #: Memory of results of collectives, of all ranks of a group as soon as the first one fires.
        self._boxed: dict[ActorId, frozenset[_Memory]] = {}
        self._senders: dict[ActorId, list[ActorId]] = defaultdict(list)
        for link in plan.links:
            self._senders[link.receiver].append(link.sender)
        self._sent: dict[ActorId, frozenset[_Memory]] = {}
        self._segments: dict[object, SegmentHazards] = {}

    def look(self, actor_ids: Iterable[ActorId]) -> None:
        """Record the uses of some actors.

        Args:
            actor_ids: All actors that touch the states, each after the actors whose results it
                takes; the actors of a collective after each other.
        """
        for actor_id in actor_ids:
            part = self.plan.by_rank[actor_id[0]]
            actor = part.by_name[actor_id[1]]
            taken = self._taken(part, actor)
            made = self._look(part, actor, taken)
            writes = any((part.rank, state) in self.states for state in actor.in_place)
            if taken or writes or any(made.values()):
                self.touch.add(actor_id)

    def _taken(self, part: RankPlan, actor: Actor) -> dict[str, frozenset[_Memory]]:
        """Return the memory of the values that an actor takes and reads."""
        found: dict[str, frozenset[_Memory]] = {}
        for register in part.inputs_of[actor.name]:
            # The value of a carried state within a step is put in force after it, so it is in no
            # such memory: see `_leave`.
            for key in () if register.carries else register.keys:
                if made := self._made.get((part.rank, register.producer, key)):
                    found[key] = found.get(key, frozenset()) | made
        for key in actor.reads:
            if state := self.states.get((part.rank, key)):
                found[key] = frozenset((state,))
        return found

    def _look(self, part: RankPlan, actor: Actor, taken: _Places) -> _Places:
        """Record the uses of an actor; return the memory that its results are in."""
        actor_id = part.rank, actor.name
        made: _Places
        if isinstance(actor, Compute):
            is_writer = bool(actor.in_place or actor.donated)
            made = self._compute(actor_id, actor, taken) if taken or is_writer else {}
        elif isinstance(actor, Accumulate):
            self._note(actor_id, taken.values(), 0)
            # The part of the last micro-batch is passed on without a copy.
            made = {t: taken[p] for p, t, how in actor.accumulates if how is None and p in taken}
        elif isinstance(actor, Send):
            self._note(actor_id, taken.values(), 0)
            self._sent[actor_id] = frozenset().union(*taken.values())
            made = {}
        else:
            # A value that overwrites a state is copied after the firing.
            self._overwrite(part.rank, dict.fromkeys(actor.in_place, 1))
            boxed = self._box(actor_id, actor, taken)
            self._note(actor_id, (boxed,), 1 if actor.in_place else 0)
            made = {actor.makes: boxed}
        for key, memory in made.items():
            if memory:
                self._made[part.rank, actor.name, key] = memory
        self._leave(actor_id, actor, made)
        return made

    def _overwrite(self, rank: int, states: Mapping[str, int]) -> None:
        """Record the first instruction that overwrites each state."""
        for name, at in states.items():
            if state := self.states.get((rank, name)):
                state.at = at

    def _note(self, actor_id: ActorId, places: Iterable[Iterable[_Memory]], last: int) -> None:
        for memory in frozenset().union(*places):
            memory.lookers.append((actor_id, last))

    def _leave(self, actor_id: ActorId, actor: Actor, made: _Places) -> None:
        """Record the values that outlive the step."""
        gone = [(f"the result {name!r}", key) for name, key in actor.emits]
        gone += [(f"the state {s!r}", key) for s, key in actor.writes if s not in actor.in_place]
        for what, key in gone:
            for memory in made.get(key, ()):
                memory.leaves.append((actor_id, what))

    def _box(
        self, actor_id: ActorId, actor: Collective | Receive, taken: _Places
    ) -> frozenset[_Memory]:
        """Return the memory that a boxing result may be in, from the shards of all its ranks."""
        rank, name = actor_id
        if isinstance(actor, Receive):
            sent = (self._sent.get(sender, frozenset()) for sender in self._senders[actor_id])
            return _boxed(frozenset().union(*taken.values(), *sent))
        if actor_id not in self._boxed:
            group = self.plan.steps[actor.step].group(rank)
            ranks = dict.fromkeys(self._stands_for.get(other, other) for other in group)
            parts = [self.plan.by_rank[other] for other in ranks]
            shards = [self._taken(part, part.by_name[name]).values() for part in parts]
            boxed = _boxed(frozenset().union(*(one for places in shards for one in places)))
            self._boxed |= dict.fromkeys(((part.rank, name) for part in parts), boxed)
        return self._boxed[actor_id]

    def _compute(self, actor_id: ActorId, actor: Compute, taken: _Places) -> _Places:
        """Record the uses of a segment; return the memory of the keys that leave it."""
        # Ranks share their instructions, which the plan keeps alive.
        shared = tuple(map(id, actor.instructions)), frozenset(taken)
        what = (*shared, keys_out(actor), actor.writes, actor.in_place, actor.donated)
        if what not in self._segments:
            self._segments[what] = SegmentHazards(actor, taken, actor_id[0])
        segment = self._segments[what]
        self._overwrite(actor_id[0], segment.overwrites)
        for key, last in segment.last.items():
            if key not in taken:
                continue  # a state that is not wanted
            own = self.states.get((actor_id[0], key)) if key in actor.in_place else None
            self._note(actor_id, (taken[key] - {own},), last)
        made: dict[str, frozenset[_Memory]] = {}
        for key, names in segment.leaving.items():
            memory = set[_Memory]()
            for name, is_new in names:
                state = self.states.get((actor_id[0], name))
                if not is_new:
                    memory |= taken.get(name, frozenset())
                elif state is not None:
                    memory.add(state.after)
            made[key] = frozenset(memory)
        return made


def _boxed(memory: frozenset[_Memory]) -> frozenset[_Memory]:
    """Return the memory of boxing results made from shards that are in some memory."""
    if not memory:
        return memory
    made = _Memory()
    for one in memory:
        one.boxed.append(made)
    return frozenset((made,))


def _outlives(state: _State, actor_id: ActorId, what: str) -> PlanError:
    return PlanError(
        f"{what} may be in the memory of {state.name!r}, which is overwritten in place",
        where=(_named(state.writer, "which overwrites it"), _named(actor_id, "which hands it out")),
        accepted="results and states in memory of their own",
        todo=f"take {state.name!r} out of in_place of {state.writer[1]!r}",
    )


def _too_late(state: _State, actor_id: ActorId) -> PlanError:
    looks = "itself looks at it" if actor_id == state.writer else "which may look at it then"
    return PlanError(
        f"{state.name!r} is overwritten in place before all reads of its old value are done",
        where=(_named(state.writer, "which overwrites it"), _named(actor_id, looks)),
        accepted="an order of their thread, or registers, or an all-reduce of both ranks, with "
        "which the actor that overwrites it comes later",
        todo=f"take {state.name!r} out of in_place of {state.writer[1]!r}, or add a register "
        "without keys that leads to it",
    )


def _named(actor_id: ActorId, what: str) -> str:
    return f"actor {actor_id[1]!r} of rank {actor_id[0]}, {what}"


#: The writer of a state whose new value is copied there after all instructions.
_COPY = "the copy after its firing"


class SegmentHazards:
    """Uses, overwrites and outputs of a segment, from its instructions.

    0  t = view(w)           uses w, and is in its memory
    1  a = mul_(w, 0.9)      overwrites w: a is its memory now
    2  n = neg(a)            uses the new value
    3  m = neg(t)            refused: t is in memory that has another value by now

    Attributes:
        last: For each input, the last instruction that uses it before it is overwritten.
        overwrites: The first instruction that overwrites a state; copies after the firing have the
            numbers after the last instruction.
        leaving: For each key that leaves in memory of an input, the names of that memory, and
            whether it is the new value.

    Args:
        actor: The segment.
        names: For its inputs, the overwritten memory that they are in.
        rank: The rank of the segment.

    Raises:
        PlanError: an instruction uses a state after another one has overwritten it.
    """

    def __init__(self, actor: Compute, names: Iterable[str], rank: int) -> None:
        self._where = f"actor {actor.name!r} of rank {rank}"
        self.last: dict[str, int] = {}
        self.overwrites: dict[str, int] = {}
        #: How often the memory of a state has been overwritten.
        self._versions = dict.fromkeys((*actor.in_place, *actor.donated), 0)
        #: For each key, the memory that it is in and the count of overwrites when it was made.
        own = (*names, *actor.in_place, *actor.donated)
        self._lies = {name: frozenset({(name, 0)}) for name in own}
        #: The keys that instructions have written over states.
        new: set[str] = set()
        for at, entry in enumerate(actor.instructions):
            keys = keys_in(entry)
            if self._lies.keys().isdisjoint(keys):
                continue
            for key in keys:
                self._look(key, at, entry.op)
            if is_in_place(entry.op):
                new.update(self._overwrite(entry, at))
            elif may_be_view(entry.op):
                lies = frozenset[tuple[str, int]]()
                for key in keys:
                    lies |= self._lies.get(key, frozenset())
                self._lies |= dict.fromkeys(entry.outputs, lies)
        for key in keys_out(actor):
            # No other actor has the old value of a donated key.
            for name, version in self._lies.get(key, ()):
                if name in actor.donated and version != self._versions[name]:
                    raise self._error(f"{key!r} is handed on when {name!r} has been overwritten")
        at = len(actor.instructions)
        for state, key in actor.writes:
            is_there = key in new and self._lies[key] == {(state, self._versions.get(state))}
            if state in actor.in_place and not is_there:
                self._look(key, at, _COPY)
                self._write(state, at, _COPY, (key,))
                at += 1
        self.leaving = {
            key: frozenset(
                (name, 0 < version == self._versions.get(name)) for name, version in held
            )
            for key in keys_out(actor)
            if (held := self._lies.get(key))
        }

    def _look(self, key: str, at: int, by: str) -> None:
        for name, version in self._lies.get(key, ()):
            if version != self._versions.get(name, 0):
                raise self._error(f"{by} looks at {key!r} when {name!r} has been overwritten")
            if not version:
                self.last[name] = at

    def _overwrite(self, entry: Instruction, at: int) -> Iterator[str]:
        """Record the overwrites of an instruction; yield the results that are in that memory."""
        taken = [ref.name for ref in refs((entry.args, tuple(entry.kwargs.values())))]
        for key, made in zip_longest(written_keys(entry), entry.outputs):
            others = taken.copy()
            others.remove(key)
            lies = self._lies.get(key, frozenset())
            for name, _ in lies:
                self._write(name, at, entry.op, others)
            if made is not None and lies:
                self._lies[made] = frozenset((name, self._versions[name]) for name, _ in lies)
                yield made

    def _write(self, name: str, at: int, by: str, others: Iterable[str]) -> None:
        """Record that a state is overwritten by a call that uses other states."""
        for key in others:
            if any(one == name for one, _ in self._lies.get(key, ())):
                raise self._error(f"{by} looks at {key!r}, and overwrites {name!r} with it")
        self._versions[name] += 1
        self.overwrites.setdefault(name, at)

    def _error(self, what: str) -> PlanError:
        return PlanError(
            f"{what}, and may be in its memory",
            where=self._where,
            accepted="instructions that look at a state before those that overwrite it",
            todo="put it before them, or take the state out of in_place",
        )
