"""Generate one Python function for a compute segment: readable, with values freed after last use.

before: instructions a = mm(x, w); b = relu(a)   inputs x, w; outputs b
after:  def segment(x, w):
            v0 = aten_mm_default(x, w)
            v1 = aten_relu_default(v0); del v0
            return (v1,)

Knows torch.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sbp_core.boxing.execute import local_step
from sbp_core.boxing.step import Step
from sbp_core.compile.physical import LOCAL_BOX, Actor, Instruction
from sbp_core.graph.ir import Argument, Ref, Symbol, refs
from sbp_core.runtime.operators import makes_one_tensor, operator_of, results_of

Segment = Callable[..., tuple[Any, ...]]


def keys_out(actor: Actor) -> tuple[str, ...]:
    """Return the keys that a segment's function returns: for registers, results and states."""
    leaving = (key for _, key in (*actor.emits, *actor.writes))
    return tuple(dict.fromkeys((*actor.outputs, *leaving)))


def segment_function(actor: Actor, rank: int, steps: Sequence[Step]) -> Segment:
    """Return the function of a compute actor.

    It takes `actor.inputs` and `actor.reads`, in this order, and returns `keys_out(actor)`.
    """
    source, names = segment_source(actor)
    namespace: dict[str, Any] = {"torch": torch, "results_of": results_of}
    for op, name in names.items():
        namespace[name] = _local_box(rank, steps) if op == LOCAL_BOX else operator_of(op)
    file = f"<segment {actor.name} of rank {rank}>"
    exec(compile(source, file, "exec"), namespace)
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: Segment = namespace["segment"]
    return made


def _local_box(rank: int, steps: Sequence[Step]) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def run(value: torch.Tensor, index: int) -> torch.Tensor:
        return local_step(steps[index], rank, value)

    return run


def segment_source(actor: Actor) -> tuple[str, dict[str, str]]:
    """Return the source of a segment's function, and the name used in it for each operator."""
    writer = _Writer(actor)
    return writer.write(), writer.operators


class _Writer:
    """The state of writing one function."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.names: dict[str, str] = {}
        self.operators: dict[str, str] = {}
        for key in (*actor.inputs, *actor.reads):
            self.names[key] = f"v{len(self.names)}"

    def write(self) -> str:
        returned = keys_out(self.actor)
        last: dict[str, int] = {}
        for index, entry in enumerate(self.actor.instructions):
            for key in (*_keys(entry), *entry.outputs):
                last[key] = index
        lines = [f"def segment({', '.join(self.names.values())}):"]
        for index, entry in enumerate(self.actor.instructions):
            lines.append(f"    {self._call(entry)}  # {entry.node}")
            dead = [self.names[k] for k, at in last.items() if at == index and k not in returned]
            if dead:
                lines.append(f"    del {', '.join(dead)}")
        values = "".join(f"{self.names[key]}, " for key in returned)
        lines.append(f"    return ({values})")
        return "\n".join(lines) + "\n"

    def _call(self, entry: Instruction) -> str:
        name = self._operator(entry.op)
        arguments = [self._text(part) for part in entry.args]
        arguments += [f"{key}={self._text(part)}" for key, part in entry.kwargs.items()]
        for key in entry.outputs:
            self.names[key] = f"v{len(self.names)}"
        call = f"{name}({', '.join(arguments)})"
        if entry.op == LOCAL_BOX or makes_one_tensor(entry.op):
            return f"{self.names[entry.outputs[0]]} = {call}"
        targets = "".join(f"{self.names[key]}, " for key in entry.outputs)
        return f"({targets}) = results_of({call})"

    def _operator(self, op: str) -> str:
        """Return the name of an operator in the source; `a_b.c` and `a.b_c` get two."""
        if op not in self.operators:
            name = op.replace(".", "_")
            while name in self.operators.values():
                name += "_"
            self.operators[op] = name
        return self.operators[op]

    def _text(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return self.names[argument.name]
        if isinstance(argument, Symbol):
            if argument.kind == "device":
                return f"torch.device({argument.name!r})"
            return f"torch.{argument.name}"
        if isinstance(argument, tuple):
            return f"[{', '.join(map(self._text, argument))}]"
        if isinstance(argument, float) and not math.isfinite(argument):
            return f"float({str(argument)!r})"
        return repr(argument)


def _keys(entry: Instruction) -> list[str]:
    return [ref.name for ref in refs((entry.args, tuple(entry.kwargs.values())))]


def sources(actors: Mapping[str, Actor]) -> dict[str, str]:
    """Return the source of every compute segment by actor name, for people to read."""
    return {name: segment_source(actor)[0] for name, actor in actors.items() if actor.instructions}
