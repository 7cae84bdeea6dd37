"""In which order the instructions of a segment look at states and write over them.

0  t = view(w)           looks at w, and lies in its memory
1  a = mul_(w, 0.9)      overwrites w: a is its memory now
2  n = neg(a)            looks at the new value
3  m = neg(t)            refused: t lies in memory that has another value by now
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from sbp_core.compile.actors import Compute, Instruction, keys_in, keys_out
from sbp_core.compile.overwriting import is_in_place, written_keys
from sbp_core.errors import PlanError
from sbp_core.graph.ir import refs
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.signatures.views import is_view

#: What overwrites a state whose new value no instruction has written there.
_COPY = "the copy behind its firing"


class SegmentHazards:
    """What a segment looks at, what it overwrites, and what it hands on.

    Attributes:
        last: The last instruction that looks at what the segment takes, before it is overwritten.
        overwrites: The first instruction that overwrites a state; copies behind the firing are
            numbered on.
        leaving: For each key that leaves in somebody's memory, the names of what it lies in, and
            whether it is the new value.

    Args:
        actor: The segment.
        names: What it takes that lies in memory which is overwritten somewhere.
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
            elif entry.op == LOCAL_BOX or is_view(entry.op):
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
        """Note what an instruction writes over; yield the results that lie there."""
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
            f"{what}, in whose memory it may lie",
            where=self._where,
            accepted="instructions that look at a state before those that overwrite it",
            todo="put it before them, or take the state out of in_place",
        )
