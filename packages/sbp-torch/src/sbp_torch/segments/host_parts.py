"""Split a segment into three parts: host arithmetic and random draws, tensors, updates of states.

A segment is a list of operators that a rank runs without communication in between. Inductor
compiles the tensor part, or a CUDA graph records it (`inductor`, `cudagraph`). Python executes the
parts before and after it.

before: instructions  p = pow(0.9, n);  u = random_uniform([4], seed, n, 7);  y = mul(x, p);
                      z = add(y, u)                      inputs x; reads n, seed
after:  before        p = pow(0.9, n);  u = random_uniform([4], seed, n, 7)      by Python
        tensor part   y = mul(x, p);  z = add(y, u)      of the tensors x, u and the number p
        after         (updates in place, and instructions that use them; none here) by Python

Host arithmetic uses Python's doubles, so Python executes it; and a number that changes in each step
must not become a constant in compiled code. Random operators without tensor arguments cannot be
fused with anything. Copies to and from host memory wait for the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from sbp_core.boxing import BoxingStep
from sbp_core.compile import (
    LOCAL_BOX,
    Compute,
    Instruction,
    dying_keys,
    is_in_place,
    keys_in,
    keys_out,
)
from sbp_core.graph import Ref, map_refs
from sbp_torch.boxing.execute import local_step
from sbp_torch.ops import operators
from sbp_torch.ops.host_copies import HOST_COPIES


@dataclass(frozen=True, kw_only=True)
class SegmentParts:
    """A segment of one rank in three parts.

    Args:
        actor: The compute actor of the segment.
        rank: The rank that executes it.
        steps: Boxing steps of the plan, for local steps inside the segment.
        before: Instructions that Python executes first.
        tensor: Instructions of the tensor part, in order.
        after: Instructions that Python executes last: those that overwrite states, and those that
            use their results.
    """

    actor: Compute
    rank: int
    steps: Sequence[BoxingStep]
    before: tuple[Instruction, ...]
    tensor: tuple[Instruction, ...]
    after: tuple[Instruction, ...] = ()

    @cached_property
    def segment_inputs(self) -> tuple[str, ...]:
        """Keys that the segment takes, in the order of its arguments."""
        return (*self.actor.inputs, *self.actor.reads)

    @cached_property
    def tensor_inputs(self) -> tuple[str, ...]:
        """Keys that the tensor part takes: inputs of the segment, or results of the first part."""
        own = {key for entry in self.tensor for key in entry.outputs}
        keys = (key for entry in self.tensor for key in keys_in(entry) if key not in own)
        return tuple(dict.fromkeys(keys))

    @cached_property
    def tensor_outputs(self) -> tuple[str, ...]:
        """Keys that the tensor part makes and that the last part or other actors use."""
        own = {key for entry in self.tensor for key in entry.outputs}
        late = (key for entry in self.after for key in keys_in(entry))
        return tuple(key for key in dict.fromkeys((*keys_out(self.actor), *late)) if key in own)

    def run_before(self, values: dict[str, Any]) -> None:
        """Execute the first part; add its results to `values`."""
        for entry in self.before:
            self._execute(entry, values)

    def run_tensor(self, given: Sequence[Any]) -> list[Any]:
        """Execute the tensor part, one operator at a time.

        Args:
            given: The values of `tensor_inputs`.

        Returns:
            The values of `tensor_outputs`.
        """
        values = dict(zip(self.tensor_inputs, given, strict=True))
        for entry, dying in zip(self.tensor, self._dying, strict=True):
            self._execute(entry, values)
            for key in dying:
                values.pop(key, None)
        return [values[key] for key in self.tensor_outputs]

    @cached_property
    def _dying(self) -> tuple[tuple[str, ...], ...]:
        dying = zip(self.actor.instructions, dying_keys(self.actor), strict=True)
        late = {id(entry): keys for entry, keys in dying}
        return tuple(late[id(entry)] for entry in self.tensor)

    def _execute(self, entry: Instruction, values: dict[str, Any]) -> None:
        read = values.__getitem__
        if entry.op == LOCAL_BOX:
            source, index = entry.args
            made: tuple[Any, ...] = (local_step(self.steps[index], self.rank, read(source.name)),)
        else:
            made = operators.call(entry.op, entry.args, entry.kwargs, read)
        values |= zip(entry.outputs, made, strict=True)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """A key of the tensor part's computation without names: the same for equal layers."""
        numbers = {key: index for index, key in enumerate(self.tensor_inputs)}
        lines = []
        for entry in self.tensor:
            arguments = (entry.args, tuple(entry.kwargs.values()))
            text = repr(map_refs(arguments, lambda ref: Ref(str(numbers[ref.name]))))
            local = (self.steps[entry.args[1]], self.rank) if entry.op == LOCAL_BOX else ()
            for key in entry.outputs:
                numbers[key] = len(numbers)
            out = tuple(numbers[key] for key in entry.outputs)
            lines.append((entry.op, tuple(entry.kwargs), text, local, out))
        return (tuple(lines), tuple(numbers[key] for key in self.tensor_outputs))

    def results(self, values: Mapping[str, Any], made: Sequence[Any]) -> tuple[Any, ...]:
        """Execute the last part; return the results of the segment, in the order of `keys_out`.

        Args:
            values: The values after the first part, by key.
            made: The values of `tensor_outputs`.
        """
        own = {**values, **dict(zip(self.tensor_outputs, made, strict=True))}
        for entry in self.after:
            self._execute(entry, own)
        return tuple(own[key] for key in keys_out(self.actor))


def part_segment(
    actor: Compute, rank: int, steps: Sequence[BoxingStep], tensors: frozenset[str]
) -> SegmentParts:
    """Split a segment; `tensors` names the inputs that are tensors, not host numbers."""
    known = {*actor.inputs, *actor.reads}
    numbers = known - tensors
    before: list[Instruction] = []
    tensor: list[Instruction] = []
    after: list[Instruction] = []
    late: set[str] = set()
    for entry in actor.instructions:
        keys = set(keys_in(entry))
        if is_in_place(entry.op) or keys & late:
            after.append(entry)
            late.update(entry.outputs)
            continue
        is_host = entry.op.startswith("host.") and keys <= known
        is_draw = entry.op.startswith("sbp.random_") and keys <= numbers
        is_copy = entry.op in HOST_COPIES and keys <= known
        if not (is_host or is_draw or is_copy):
            tensor.append(entry)
            continue
        before.append(entry)
        known.update(entry.outputs)
        if is_host:
            numbers.update(entry.outputs)
    return SegmentParts(
        actor=actor,
        rank=rank,
        steps=steps,
        before=tuple(before),
        tensor=tuple(tensor),
        after=tuple(after),
    )


class PartedSegment(ABC):
    """The function of one segment on one rank, which is split at its first call."""

    def __init__(self, actor: Compute, rank: int, steps: Sequence[BoxingStep]) -> None:
        self._of = (actor, rank, steps)
        self._segment: SegmentParts | None = None

    def parts(self, values: Sequence[Any]) -> SegmentParts:
        """Return the three parts. The values of the first call decide which keys are tensors."""
        if self._segment is None:
            actor = self._of[0]
            tensors = tensor_keys((*actor.inputs, *actor.reads), values)
            self._segment = part_segment(*self._of, tensors)
        return self._segment

    def __call__(self, values: list[Any], /) -> tuple[Any, ...]:
        """See `OwningSegment`."""
        segment = self.parts(values)
        held = dict(zip(segment.segment_inputs, values, strict=True))
        values.clear()
        segment.run_before(held)
        if not segment.tensor:
            return segment.results(held, ())
        made = self.run_tensor(segment, [held[key] for key in segment.tensor_inputs])
        return segment.results(held, made)

    @abstractmethod
    def run_tensor(self, segment: SegmentParts, given: list[Any]) -> Sequence[Any]:
        """Return the values of `tensor_outputs` for the values of `tensor_inputs`."""


def tensor_keys(keys: Sequence[str], values: Sequence[Any]) -> frozenset[str]:
    """Return the keys whose values are tensors."""
    return frozenset(k for k, value in zip(keys, values, strict=True) if isinstance(value, Tensor))
