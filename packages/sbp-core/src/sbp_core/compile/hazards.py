"""No state is overwritten before all are through with its old value: write-after-read hazards.

What `Actor.in_place` says is an optimisation: what a step makes must not depend on it. So wherever
a state is overwritten on a rank, whatever else looks at its memory as it was before

    reads the state, or a view of it that came by a register        on the same rank
    boxes it, or takes what boxing has made of it                   on any rank

is through before the overwriting actor begins (`happens_before`). Inside of that actor it is so
instruction by instruction. And what outlives the step, results and states that are put in force
after it, is in no memory that is overwritten: the next step would change it.

    optimizer.0.0      t = view(w); n = norm(t); a = mul_(w, ..); b = neg(a)      t before mul_ only

Threads of one process hand each other what they have as it is. So what boxing makes may be in the
memory of each shard that it is made of, on whatever rank.

What no boxing takes is looked at on its own rank alone. It is proved for one rank of each class,
as all of a class do the same (`symmetry`); only the memory of states that are boxed is followed
through all ranks.

One step stands for all: a step begins on the ranks of a process when the last one is through on
all of them, and processes share no memory, as they send copies. So whoever reads a new value has
had it before the next step overwrites it.
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
    """Prove that nobody looks at a state when it is overwritten, or expects the old value later.

    Args:
        plan: That `plan_spec` accepts, and that comes to its end.
        folded: The same, of one rank of each class.
        firings: All of a step of the folded plan, in an order in which they may happen; those of a
            collective after each other.

    Raises:
        PlanError: names the actor that overwrites a state, and the one that looks at it.
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
    """Check that all are through with a state when it is overwritten.

    Raises:
        PlanError: names who is not.
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


#: An actor that looks at memory, and the number of its last instruction that does.
_Looker = tuple[ActorId, int]


@dataclass(slots=True, eq=False)
class _Memory:
    """The memory of some states as it is before they are overwritten, or after.

    Args:
        lookers: Who looks at it.
        leaves: Results and states that are in it after the step, with the actors they leave.
        boxed: What boxing has made of it, and may be in it.
    """

    lookers: list[_Looker] = field(default_factory=list)
    leaves: list[tuple[ActorId, str]] = field(default_factory=list)
    boxed: list[_Memory] = field(default_factory=list)
    _checked: tuple[Clock, list[_Looker]] | None = None

    def reached(self) -> Iterator[_Memory]:
        """Yield it, and all that may be in it by boxing."""
        met, todo = {id(self)}, [self]
        while todo:
            yield (one := todo.pop())
            new = [other for other in one.boxed if id(other) not in met]
            met.update(map(id, new))
            todo += new

    def late(self, before: HappensBefore, clock: Clock) -> list[_Looker]:
        """Return who may look at it when something of a clock begins."""
        # Behind a commit all ranks know the same of each other, so this is asked once a commit: who
        # is through for all is so for each.
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
        name: Of the state.
        writer: The actor that overwrites it.
        at: The number of the instruction that does so first.
        after: Its memory from then on.
    """

    name: str = ""
    writer: ActorId = (0, "")
    at: int = 0
    after: _Memory = field(default_factory=_Memory)


#: Of each key that is in memory that is overwritten somewhere, in which.
_Places = Mapping[str, frozenset[_Memory]]


class _Lookers:
    """Who looks at the memory of overwritten states.

    Attributes:
        states: What is overwritten, by rank and name.
        touch: The actors that look at their memory, or make something that may be in it.

    Args:
        plan: See `verify_overwriting`; or one rank of each class of it.
        stands_for: Of one rank of each class, which one each rank is represented by.
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
        #: What actors put into registers, by rank, actor and key.
        self._made: dict[tuple[int, str, str], frozenset[_Memory]] = {}
        #: What collectives make, of all ranks of a group as soon as the first one comes.
        self._boxed: dict[ActorId, frozenset[_Memory]] = {}
        self._senders: dict[ActorId, list[ActorId]] = defaultdict(list)
        for link in plan.links:
            self._senders[link.receiver].append(link.sender)
        self._sent: dict[ActorId, frozenset[_Memory]] = {}
        self._segments: dict[object, SegmentHazards] = {}

    def look(self, actor_ids: Iterable[ActorId]) -> None:
        """Let actors look.

        Args:
            actor_ids: All that touch the states, each after those that it takes something of, and
                those of a collective after each other.
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
        """Return the memory of what an actor takes and reads."""
        found: dict[str, frozenset[_Memory]] = {}
        for register in part.inputs_of[actor.name]:
            # What a carried state is, in a step, is put in force after it, so it is in no such
            # memory: see `_leave`.
            for key in () if register.carries else register.keys:
                if made := self._made.get((part.rank, register.producer, key)):
                    found[key] = found.get(key, frozenset()) | made
        for key in actor.reads:
            if state := self.states.get((part.rank, key)):
                found[key] = frozenset((state,))
        return found

    def _look(self, part: RankPlan, actor: Actor, taken: _Places) -> _Places:
        """Note what an actor looks at; return in which memory lies what it makes."""
        actor_id = part.rank, actor.name
        made: _Places
        if isinstance(actor, Compute):
            is_writer = bool(actor.in_place or actor.donated)
            made = self._compute(actor_id, actor, taken) if taken or is_writer else {}
        elif isinstance(actor, Accumulate):
            self._note(actor_id, taken.values(), 0)
            # The part of the last micro-batch is handed on as it is.
            made = {t: taken[p] for p, t, how in actor.accumulates if how is None and p in taken}
        elif isinstance(actor, Send):
            self._note(actor_id, taken.values(), 0)
            self._sent[actor_id] = frozenset().union(*taken.values())
            made = {}
        else:
            # What goes over a state is copied after the firing.
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
        """Note which instructions overwrite states first."""
        for name, at in states.items():
            if state := self.states.get((rank, name)):
                state.at = at

    def _note(self, actor_id: ActorId, places: Iterable[Iterable[_Memory]], last: int) -> None:
        for memory in frozenset().union(*places):
            memory.lookers.append((actor_id, last))

    def _leave(self, actor_id: ActorId, actor: Actor, made: _Places) -> None:
        """Note what outlives the step."""
        gone = [(f"the result {name!r}", key) for name, key in actor.emits]
        gone += [(f"the state {s!r}", key) for s, key in actor.writes if s not in actor.in_place]
        for what, key in gone:
            for memory in made.get(key, ()):
                memory.leaves.append((actor_id, what))

    def _box(
        self, actor_id: ActorId, actor: Collective | Receive, taken: _Places
    ) -> frozenset[_Memory]:
        """Return the memory of what boxing makes of the shards of all ranks that take part."""
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
        """Note what a segment looks at; return the memory of what leaves it."""
        # Ranks share their instructions, which the plan keeps alive.
        shared = tuple(map(id, actor.instructions)), frozenset(taken)
        what = (*shared, keys_out(actor), actor.writes, actor.in_place, actor.donated)
        if what not in self._segments:
            self._segments[what] = SegmentHazards(actor, taken, actor_id[0])
        segment = self._segments[what]
        self._overwrite(actor_id[0], segment.overwrites)
        for key, last in segment.last.items():
            if key not in taken:
                continue  # a state that is not asked about
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
    """Return the memory of what is made of shards that are in some memory."""
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
        f"{state.name!r} is overwritten in place before all are through with its old value",
        where=(_named(state.writer, "which overwrites it"), _named(actor_id, looks)),
        accepted="an order of their thread, or registers, or an all-reduce of both ranks, by which "
        "the one that overwrites it comes later",
        todo=f"take {state.name!r} out of in_place of {state.writer[1]!r}, or let a register "
        "without keys lead to it",
    )


def _named(actor_id: ActorId, what: str) -> str:
    return f"actor {actor_id[1]!r} of rank {actor_id[0]}, {what}"


#: What overwrites a state whose new value no instruction has written there.
_COPY = "the copy after its firing"


class SegmentHazards:
    """What a segment looks at, what it overwrites, and what it hands on: by its instructions.

    0  t = view(w)           looks at w, and is in its memory
    1  a = mul_(w, 0.9)      overwrites w: a is its memory now
    2  n = neg(a)            looks at the new value
    3  m = neg(t)            refused: t is in memory that has another value by now

    Attributes:
        last: The last instruction that looks at what the segment takes, before it is overwritten.
        overwrites: The first instruction that overwrites a state; copies after the firing are
            numbered on.
        leaving: For each key that leaves in somebody's memory, the names of what it is in, and
            whether it is the new value.

    Args:
        actor: The segment.
        names: What it takes that is in memory which is overwritten somewhere.
        rank: Whose it is.

    Raises:
        PlanError: an instruction looks at a state when another one has overwritten it.
    """

    def __init__(self, actor: Compute, names: Iterable[str], rank: int) -> None:
        self._where = f"actor {actor.name!r} of rank {rank}"
        self.last: dict[str, int] = {}
        self.overwrites: dict[str, int] = {}
        #: How often the memory of a state has been overwritten.
        self._versions = dict.fromkeys((*actor.in_place, *actor.donated), 0)
        #: For each key in whose memory it lies, and what was written there when it was made.
        own = (*names, *actor.in_place, *actor.donated)
        self._lies = {name: frozenset({(name, 0)}) for name in own}
        #: What instructions have written over states.
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
            # Of what it is given nobody else has the old value.
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
        """Note what an instruction writes over; yield the results that are there."""
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
        """Note that a state is overwritten by something that looks at others."""
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
