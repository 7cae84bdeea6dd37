"""Generate a readable Python function for each segment of a plan, for runtimes to call in a step.

A segment is a list of operators that a rank runs without communication in between. Its function
frees values after their last use.

before: instructions a = mm(x, w); b = relu(a)   inputs x, w; outputs b
after:  def segment(x, w):
            v0 = aten_mm_default(x, w)
            v1 = aten_relu_default(v0); del v0
            return (v1,)
"""

from __future__ import annotations

import linecache
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from keyword import iskeyword
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import torch

from sbp_core.boxing import BoxingStep
from sbp_core.compile import (
    LOCAL_BOX,
    Compute,
    Instruction,
    dying_keys,
    first_overwrites,
    keys_out,
)
from sbp_core.errors import SbpTypeError, SbpValueError
from sbp_core.graph import Argument, Ref, Symbol
from sbp_torch.boxing.execute import local_step
from sbp_torch.ops.operators import makes_one_tensor, operator_of, results_of, symbol_value

Segment = Callable[..., tuple[Any, ...]]

#: (input values, function to call with the name of a state before its update) -> output values.
TellingSegment = Callable[[list[Any], Callable[[str], None]], tuple[Any, ...]]

#: (input values, clock in nanoseconds) -> (output values, times of the clock).
TimedSegment = Callable[[list[Any], Callable[[], int]], tuple[tuple[Any, ...], tuple[int, ...]]]


def segment_function(
    actor: Compute, rank: int, steps: Sequence[BoxingStep], *, owns: bool = False
) -> Segment:
    """Return the function of a compute actor.

    It takes `actor.inputs` and `actor.reads`, in this order, and returns `keys_out(actor)`.

    Args:
        actor: The actor.
        rank: The rank that executes it.
        steps: Boxing steps of the plan.
        owns: Whether the function takes its values in one list and empties it, so that a value
            without other references is freed after its last use. Otherwise, values are positional
            arguments, which the caller keeps alive to the end.
    """
    return _function(actor, rank, steps, owns=owns)


def telling_segment_function(
    actor: Compute, rank: int, steps: Sequence[BoxingStep]
) -> TellingSegment:
    """Return the function of a compute actor that reports each state before it overwrites it.

    It takes the list of `segment_function(owns=True)`, and a function that it calls with the name
    of each state just before the operator that overwrites it. Snapshots copy the state then.
    """
    return _function(actor, rank, steps, owns=True, tells=True)


def timed_segment_function(actor: Compute, rank: int, steps: Sequence[BoxingStep]) -> TimedSegment:
    """Return the function of a compute actor that reads a clock between its operators.

    It takes the list of `segment_function(owns=True)`, and a clock. It returns the output values,
    and the times: the start of each instruction, and the end of the last one.
    """
    return _function(actor, rank, steps, owns=True, is_timed=True)


def operator_clock(values: Iterable[Any]) -> Callable[[], int]:
    """Return a wall clock in nanoseconds for a timed segment with these inputs.

    If an input is on a GPU, the clock first waits until the GPU has finished its work.
    """
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in values):
        return time.time_ns

    def wait_and_look() -> int:
        torch.cuda.synchronize()
        return time.time_ns()

    return wait_and_look


def _function(
    actor: Compute, rank: int, steps: Sequence[BoxingStep], **form: bool
) -> Callable[..., Any]:
    """Return the function of a segment's source; `form` is as for `segment_source`."""
    source, names = segment_source(actor, **form)
    namespace: dict[str, Any] = {"torch": torch, "results_of": results_of}
    namespace |= {name: operator_of(op) for op, name in names.items() if op != LOCAL_BOX}
    if LOCAL_BOX in names:
        namespace[names[LOCAL_BOX]] = lambda value, index: local_step(steps[index], rank, value)
    file = f"<segment {actor.name} of rank {rank}>"
    exec(compile(source, file, "exec"), namespace)
    # With this entry, tracebacks and debuggers show the lines of the generated function.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: Callable[..., Any] = namespace["segment"]
    return made


def failed_call(error: BaseException) -> str:
    """Return the node and the call in a segment's function that raised an error, or ""."""
    for frame, line in walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith("<segment "):
            call, node = _call_at(frame, line)
            return f"op {node!r}: {call}"
    return ""


def _call_at(frame: FrameType, line: int) -> tuple[str, str]:
    """Return the call in a line of a segment's function, and its node."""
    text = linecache.getline(frame.f_code.co_filename, line)
    call, _, node = text.strip().partition("  # ")
    return call, node


def running_node() -> str:
    """Return the node whose operator this thread's segment function is calling, or ""."""
    for frame, line in walk_stack(sys._getframe()):
        if frame.f_code.co_filename.startswith("<segment "):
            return _call_at(frame, line)[1]
    return ""


def segment_source(
    actor: Compute, *, owns: bool = False, tells: bool = False, is_timed: bool = False
) -> tuple[str, dict[str, str]]:
    """Return the source of a segment's function, and the name used in it for each operator.

    Args:
        actor: The compute actor.
        owns: See `segment_function`.
        tells: See `telling_segment_function`; needs `owns`.
        is_timed: See `timed_segment_function`; needs `owns`.
    """
    writer = _Writer(actor)
    names = writer.names
    lines = [f"def segment({', '.join(names.values())}):"]
    if owns:
        further = ", before_overwrite" * tells + ", clock" * is_timed
        lines = [f"def segment(taken{further}):"]
        if names:
            # The caller's list is emptied, so these names are the only references: `del` frees.
            lines.append(f"    {', '.join(names.values())}, = taken; taken.clear()")
    firsts = first_overwrites(actor) if tells else {}
    times = "".join(f"t{at}, " for at in range(len(actor.instructions) + 1))
    if is_timed:
        lines.append("    t0 = clock()")
    entries = zip(actor.instructions, dying_keys(actor), strict=True)
    for at, (entry, dying) in enumerate(entries):
        lines += [f"    before_overwrite({state!r})" for state in firsts.get(at, ())]
        lines.append(f"    {writer.call(entry)}  # {repr(entry.node)[1:-1]}")  # on one line
        if dying:
            lines.append(f"    del {', '.join(names[key] for key in dying)}")
        if is_timed:
            lines.append(f"    t{at + 1} = clock()")
    values = "".join(f"{names[key]}, " for key in keys_out(actor))
    lines.append(f"    return ({values})" + f", ({times})" * is_timed)
    return "\n".join(lines) + "\n", writer.operators


class _Writer:
    """Writes calls of instructions, and names the values and operators in one function."""

    def __init__(self, actor: Compute) -> None:
        self.actor = actor
        self.names = {key: f"v{at}" for at, key in enumerate((*actor.inputs, *actor.reads))}
        self.operators: dict[str, str] = {}

    def call(self, entry: Instruction) -> str:
        """Return the source line of an instruction: an assignment of a call to new names.

        Raises:
            SbpTypeError: an argument is of a type that plans do not have.
            SbpValueError: the name of an operator or argument is no identifier.
        """
        name = self._operator(entry.op)
        for key in entry.kwargs:
            if not key.isidentifier() or iskeyword(key):
                raise SbpValueError(f"{key!r} is no name of an argument", accepted="identifiers")
        arguments = [self._text(part) for part in entry.args]
        arguments += [f"{key}={self._text(part)}" for key, part in entry.kwargs.items()]
        for key in entry.outputs:
            self.names[key] = f"v{len(self.names)}"
        call = f"{name}({', '.join(arguments)})"
        # Most operators make one tensor; `results_of`, which checks types, would cost more time.
        if entry.op == LOCAL_BOX or makes_one_tensor(entry.op):
            return f"{self.names[entry.outputs[0]]} = {call}"
        targets = "".join(f"{self.names[key]}, " for key in entry.outputs)
        return f"({targets}) = results_of({call})"

    def _operator(self, op: str) -> str:
        """Return the name of an operator in the source; `a_b.c` and `a.b_c` get two."""
        if op not in self.operators:
            # Plans may come from files, and this becomes source code, so only names are accepted.
            if not all(map(str.isidentifier, op.split("."))) or "." not in op:
                raise SbpValueError(
                    f"{op!r} is no name of an operator",
                    where=f"segment {self.actor.name!r}",
                    accepted="namespace.operator.overload",
                )
            name = op.replace(".", "_")
            while name in self.operators.values():
                name += "_"
            self.operators[op] = name
        return self.operators[op]

    def _text(self, argument: Argument) -> str:
        if isinstance(argument, Ref):
            return self.names[argument.name]
        if isinstance(argument, Symbol):
            symbol_value(argument)  # raises if torch has no such name
            is_device = argument.kind == "device"
            return f"torch.device({argument.name!r})" if is_device else f"torch.{argument.name}"
        if isinstance(argument, tuple):
            return f"[{', '.join(map(self._text, argument))}]"
        if isinstance(argument, float) and not math.isfinite(argument):
            # `repr` of these is a bare name, which is undefined in the source.
            return f"float({str(argument)!r})"
        if argument is None or isinstance(argument, bool | int | float | str):
            return repr(argument)
        raise SbpTypeError(
            f"an argument is a {type(argument).__name__}",
            where=f"segment {self.actor.name!r}",
            accepted="None, numbers, strings, Ref, Symbol and tuples of them",
        )
