"""A segment in three parts: host arithmetic and random draws, tensors, overwriting of states.

The tensor part is what Inductor compiles or a CUDA graph records; Python executes what comes before
and after it.

before: instructions  p = pow(0.9, n);  u = random_uniform([4], seed, n, 7);  y = mul(x, p);
                      z = add(y, u)                      inputs x; reads n, seed
after:  before        p = pow(0.9, n);  u = random_uniform([4], seed, n, 7)      by Python
        tensor part   y = mul(x, p);  z = add(y, u)      of the tensors x, u and the number p
        after         (what overwrites states, and what needs it; none here)     by Python

Host arithmetic follows Python's doubles, so Python does it; and a number that changes with each
step must not be compiled into code. Random operators that look at no tensor are calls that nothing
could be fused into. Copies to and from the memory of the host wait for it.
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
        actor: A compute actor.
        rank: Who executes it.
        steps: Of the plan, for local boxing.
        before: Instructions that Python executes first.
        tensor: The others, in order.
        after: Instructions that Python executes last: those that overwrite states, and what they
            are followed by.
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
        """Keys that the tensor part takes: of the segment, or made before."""
        own = {key for entry in self.tensor for key in entry.outputs}
        keys = (key for entry in self.tensor for key in keys_in(entry) if key not in own)
        return tuple(dict.fromkeys(keys))

    @cached_property
    def tensor_outputs(self) -> tuple[str, ...]:
        """Keys that the tensor part makes for what leaves the segment, or for what comes after."""
        own = {key for entry in self.tensor for key in entry.outputs}
        late = (key for entry in self.after for key in keys_in(entry))
        return tuple(key for key in dict.fromkeys((*keys_out(self.actor), *late)) if key in own)

    def run_before(self, values: dict[str, Any]) -> None:
        """Execute the first part; adds what it makes."""
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
        """What the tensor part computes, without names: equal for layers and ranks alike."""
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
        """Return what the segment returns, in the order of `keys_out`."""
        own = {**values, **dict(zip(self.tensor_outputs, made, strict=True))}
        for entry in self.after:
            self._execute(entry, own)
        return tuple(own[key] for key in keys_out(self.actor))


def part_segment(
    actor: Compute, rank: int, steps: Sequence[BoxingStep], tensors: frozenset[str]
) -> SegmentParts:
    """Split a segment."""
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
    """The function of one segment on one rank, parted when it is called first."""

    def __init__(self, actor: Compute, rank: int, steps: Sequence[BoxingStep]) -> None:
        self._of = (actor, rank, steps)
        self._segment: SegmentParts | None = None

    def parts(self, values: Sequence[Any]) -> SegmentParts:
        """Return the three parts; which values are tensors is seen in those of the first call."""
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
        """Return the values of `tensor_outputs` for those of `tensor_inputs`."""


def tensor_keys(keys: Sequence[str], values: Sequence[Any]) -> frozenset[str]:
    """Return the keys whose values are tensors."""
    return frozenset(k for k, value in zip(keys, values, strict=True) if isinstance(value, Tensor))
