"""When values die inside a segment, as generated code, runtimes and memory agree."""

from __future__ import annotations

from sbp_core.compile.actors import Actor, Compute, Instruction
from sbp_core.graph.ir import refs


def keys_out(actor: Actor) -> tuple[str, ...]:
    """Return the keys that leave a segment: for registers, as results and as new states."""
    leaving = (key for _, key in (*actor.emits, *actor.writes))
    return tuple(dict.fromkeys((*actor.outputs, *leaving)))


def keys_in(entry: Instruction) -> tuple[str, ...]:
    """Return the keys that an instruction takes, in the order of its arguments, each once."""
    found = refs((entry.args, tuple(entry.kwargs.values())))
    return tuple(dict.fromkeys(ref.name for ref in found))


def dying_keys(actor: Compute) -> tuple[tuple[str, ...], ...]:
    """Return for each instruction of a segment the keys that nobody uses after it.

    Results that nobody uses die with the instruction that makes them.
    """
    returned = set(keys_out(actor))
    last: dict[str, int] = {}
    for index, entry in enumerate(actor.instructions):
        for key in (*keys_in(entry), *entry.outputs):
            last[key] = index
    dying: list[list[str]] = [[] for _ in actor.instructions]
    for key, index in last.items():
        if key not in returned:
            dying[index].append(key)
    return tuple(map(tuple, dying))
