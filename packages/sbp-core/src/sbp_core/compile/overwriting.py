"""Rewrite the operators of a rank, so that new values of model states overwrite the old ones.

An operator writes over its argument if it has an in-place form, and the argument is the state
itself, or was made from it by such operators and is not needed any more:

before: a = mul(v, 0.9); b = addcmul(a, g, g); d = sqrt(b)                       v <- b
after:  a = mul_(v, 0.9); b = addcmul_(a, g, g); d = sqrt(b)         a and b are v itself

All other new values are copied over the old ones, each as soon as nothing in the segment reads the
old one any more:

    0  t = view(w)
    1  a = matmul(w, ..)    <- a is made here
    2  n = norm(t)          <- the last look at the memory of w
    -  w <- a               after instruction 2; a dies here, not at the end of the step
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from sbp_core.compile.actors import Compute, Instruction, keys_in, keys_out
from sbp_core.compile.dataflow import looks_at, may_be_view
from sbp_core.graph.ir import Argument, Ref, refs
from sbp_core.graph.primitives import CLONE, OVERWRITE
from sbp_core.signatures.views import in_place_form

#: An argument of an instruction that a result is written over: (instruction, result).
_Link = tuple[int, int]

#: Instructions, new keys of states that are copied over, and the donated keys that are overwritten.
_Rewritten = tuple[tuple[Instruction, ...], Mapping[str, str], tuple[str, ...]]


def is_in_place(op: str) -> bool:
    """Whether an operator writes over an argument."""
    kind = op.split(".")[1]
    return kind.endswith("_") and not kind.endswith("__")


def first_overwrites(actor: Compute) -> Mapping[int, tuple[str, ...]]:
    """Return the states that a segment writes over, by the first instruction that does so.

    A state in `in_place` that is not among them is overwritten by a copy after the firing.
    """
    found: dict[str, int] = {}
    for at, entry in enumerate(actor.instructions):
        if is_in_place(entry.op):
            # A chain of in-place operators begins with one that takes the state itself.
            for key in keys_in(entry):
                if key in actor.in_place:
                    found.setdefault(key, at)
    return {at: tuple(s for s in found if found[s] == at) for at in sorted(set(found.values()))}


def written_arguments(op: str, num_results: int) -> tuple[int, ...]:
    """Return the arguments that an in-place operator writes over, with lists flattened.

    Args:
        op: An operator for which `is_in_place` holds.
        num_results: Results of the call: possibly fewer than the operator can have.

    Returns:
        Empty if it is not the in-place form of another operator.
    """
    if op == OVERWRITE:
        return (0,)
    namespace, kind, *overload = op.split(".")
    form = in_place_form(".".join((namespace, kind[:-1], *overload)))
    return () if form is None else form.over[:num_results]


def written_keys(entry: Instruction) -> tuple[str, ...]:
    """Return the keys that an in-place instruction writes over, in the order of its results."""
    flat = _flat(entry.args)
    over = written_arguments(entry.op, len(entry.outputs))
    written = [flat[at] for at in over if at < len(flat)]
    return tuple(argument.name for argument in written if isinstance(argument, Ref))


class Overwriting:
    """The rewriting of all segments of a plan; ranks that share instructions share the new ones.

    Args:
        memory: For each key the states whose memory it may be in.
    """

    def __init__(self, memory: Mapping[str, frozenset[str]]) -> None:
        self.memory = memory
        self._made: dict[object, _Rewritten] = {}

    def of(self, actor: Compute) -> Compute:
        """Return a segment that overwrites the states in `in_place`, and its `donated` keys.

        Only keys that it does overwrite remain in `donated`.
        """
        # Instructions by identity: they are shared, and kept alive by the plan.
        what = (
            *(tuple(map(id, actor.instructions)), actor.writes, actor.in_place, actor.outputs),
            actor.donated,
        )
        if what not in self._made:
            self._made[what] = _Segment(actor, self.memory).rewritten()
        instructions, new_keys, donated = self._made[what]
        return replace(
            actor,
            # To be overwritten, the old value must be an input, even if nothing computes with it.
            reads=tuple(dict.fromkeys((*actor.reads, *actor.in_place))),
            writes=tuple((state, new_keys.get(state, key)) for state, key in actor.writes),
            instructions=instructions,
            donated=donated,
        )


class _Segment:
    """The rewriting of one segment."""

    def __init__(self, actor: Compute, memory: Mapping[str, frozenset[str]]) -> None:
        self.actor, self.memory = actor, memory
        self.entries = actor.instructions
        #: For each key, the instruction that makes it and the number of the result.
        self.made: dict[str, _Link] = {
            key: (at, number)
            for at, entry in enumerate(self.entries)
            for number, key in enumerate(entry.outputs)
        }
        self.uses: dict[str, list[int]] = defaultdict(list)
        self.looks: dict[str, list[int]] = defaultdict(list)
        for at, entry in enumerate(self.entries):
            for key in keys_in(entry):
                self.uses[key].append(at)
            for name in looks_at(keys_in(entry), memory):
                self.looks[name].append(at)
        self.leaving = set(keys_out(actor))

    def rewritten(self) -> _Rewritten:
        """Return the rewritten segment."""
        links: dict[int, set[int]] = defaultdict(set)
        behind: dict[int, list[Instruction]] = defaultdict(list)
        new_keys: dict[str, str] = {}
        for state, key in self.actor.writes:
            # A value that comes from another actor is copied after the firing.
            if state not in self.actor.in_place or key not in self.made:
                continue
            # A key leads back to one state at most, so no two states share a chain.
            chain = self._chain(state, key)
            for at, number in chain or ():
                links[at].add(number)
            if chain is None:
                # The state's new value leaves the segment in the old memory, with new content.
                new_keys[state] = f"{state} <- {key}"
                made = self.made[key][0]
                behind[max((made, *self.looks[state]))].append(
                    Instruction(
                        op=OVERWRITE,
                        args=(Ref(state), Ref(key)),
                        outputs=(new_keys[state],),
                        node=self.entries[made].node,
                    )
                )
        donated = tuple(self._donate(links))
        entries: list[Instruction] = []
        for at, entry in enumerate(self.entries):
            entries += _in_place(entry, links[at]) if at in links else (entry,)
            entries += behind.get(at, ())
        return tuple(entries), new_keys, donated

    def _donate(self, links: dict[int, set[int]]) -> Iterator[str]:
        """Add the results between donated keys and keys that leave; yield these donated keys."""
        # A key that leaves in their memory under another name would be used after the overwrite.
        kept = {name for key in self.leaving for name in (key, *self.memory.get(key, ()))}
        free = dict.fromkeys(key for key in self.actor.donated if key not in kept)
        for key in self.actor.outputs:
            for given in free if key in self.made else ():
                chain = self._chain(given, key)
                if chain is not None:
                    del free[given]
                    for at, number in chain:
                        links[at].add(number)
                    yield given
                    break

    def _chain(self, state: str, key: str) -> list[_Link] | None:
        """Return the results between a state and a new value, each written over the one before.

        None if there is none, or if a value is used after the next one is written.
        """
        links: list[_Link] = []
        while True:
            at, number = link = self.made[key]
            target = _target(self.entries[at], number)
            if target is None:
                return None
            links.append(link)
            if target == state:
                looks = self.looks[state]
                # All keys that are in the memory of the state, under whatever name.
                others = looks_at((k for k in keys_in(self.entries[at]) if k != state), self.memory)
                is_last = looks[-1] == at and state not in others
                return links if is_last and _is_taken_once(self.entries[at], state) else None
            if not self._dies_at(target, at):
                return None
            key = target

    def _dies_at(self, key: str, at: int) -> bool:
        """Whether an instruction is the last use of a value, which does not leave the segment."""
        return (
            key in self.made
            and key not in self.leaving
            and self.uses[key][-1] == at
            and _is_taken_once(self.entries[at], key)
            and not any(may_be_view(self.entries[use].op) for use in self.uses[key])
        )


def _target(entry: Instruction, number: int) -> str | None:
    """Return the argument that the in-place form writes a result over; None without such a form."""
    form, flat = in_place_form(entry.op), _flat(entry.args)
    # A call may have fewer results than its operator can have, such as without momentum.
    if form is None or number >= len(form.over) or form.over[number] >= len(flat):
        return None
    found = flat[form.over[number]]
    return found.name if isinstance(found, Ref) else None


def _flat(args: Sequence[Argument]) -> list[Argument]:
    """Return the arguments, with lists flattened."""
    return [part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,))]


def _in_place(entry: Instruction, numbers: set[int]) -> tuple[Instruction, ...]:
    """Return an instruction in its in-place form.

    Args:
        entry: The instruction.
        numbers: Results that may be written over their arguments; other arguments are copied first.
    """
    form = in_place_form(entry.op)
    assert form is not None, "it has one"
    flat, copies = _flat(entry.args), []
    for number in set(range(len(entry.outputs))) - numbers:
        at, copy = form.over[number], f"copy for {entry.outputs[number]}"
        copies.append(Instruction(op=CLONE, args=(flat[at],), outputs=(copy,), node=entry.node))
        flat[at] = Ref(copy)
    parts = iter(flat)
    args = tuple(
        tuple(next(parts) for _ in arg) if isinstance(arg, tuple) else next(parts)
        for arg in entry.args
    )
    return (*copies, replace(entry, op=form.op, args=args))


def _is_taken_once(entry: Instruction, key: str) -> bool:
    return sum(r.name == key for r in refs((entry.args, tuple(entry.kwargs.values())))) == 1
