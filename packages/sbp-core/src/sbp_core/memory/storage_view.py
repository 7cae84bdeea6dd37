"""Describe how tensors lie in memory, without data: strides, storage and offset.

The prediction of memory and the checker of plans replay steps on these descriptions. The tensor
library's plugin implements the interface to find them (`CallLayouts`, `LayoutLibrary`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import Instruction
from sbp_core.compile.physical import StateSlot
from sbp_core.graph.ir import ITEMSIZE, Ref
from sbp_core.graph.primitives import CAT, CLONE, MULTIPLY, STACK

#: A host number.
Number = float | int


@dataclass(frozen=True, slots=True)
class StridedLayout:
    """Shape, strides and offset (all in elements) and dtype name of a tensor in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, each counted once."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are stored row by row without gaps."""
        wanted = contiguous(self.shape, self.dtype).strides
        dims = zip(self.shape, self.strides, wanted, strict=True)
        return not self.size_bytes or all(n == 1 or one == other for n, one, other in dims)


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor in one of the numbered storages of a rank."""

    layout: StridedLayout
    storage: int
    storage_bytes: int


#: A value in the prediction of memory: the layout of a tensor, or a host number itself.
Value = StorageView | Number


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """The memory layout of one result of an instruction, and its storage.

    Args:
        layout: The layout in its storage.
        source: The argument whose storage it is in, counted over distinct argument names; -1 if in
            a new one.
        fresh: The number of the instruction's new storage that it is in; -1 if in none.
        storage_bytes: The size of that storage.
    """

    layout: StridedLayout
    source: int
    fresh: int
    storage_bytes: int


def contiguous(shape: tuple[int, ...], dtype: str) -> StridedLayout:
    """Return the layout of a contiguous tensor at the start of its storage."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return StridedLayout(shape, tuple(strides), 0, dtype)


def number_of(slot: StateSlot) -> Number:
    """Return some number for a slot that holds a host number; no layout depends on its value."""
    return 1 if slot.dtype.startswith(("int", "bool")) else 1.0


def placed(
    found: Sequence[ResultLayout | Number],
    given: Sequence[Value],
    new: Callable[[int, ResultLayout], StorageView],
) -> list[Value]:
    """Return the results of an instruction as values.

    There are three kinds: a host number, a view of an argument's storage, and a part of a new
    storage, which several results may share (`ResultLayout.fresh` numbers these storages).

    Args:
        found: The layouts of the results.
        given: The arguments, by distinct names.
        new: Makes a storage for a result, given the number of the result and its layout.
    """
    fresh: dict[int, StorageView] = {}
    made: list[Value] = []
    for number, one in enumerate(found):
        if not isinstance(one, ResultLayout):
            made.append(one)
            continue
        if one.source >= 0:
            source = given[one.source]
            assert isinstance(source, StorageView), "a view looks at a tensor"
            made.append(StorageView(one.layout, source.storage, source.storage_bytes))
            continue
        if one.fresh not in fresh:
            fresh[one.fresh] = new(number, one)
        made.append(StorageView(one.layout, fresh[one.fresh].storage, one.storage_bytes))
    return made


def first_addend(part: str, total: str, how: float | str) -> Instruction:
    """Return the instruction that starts a sum by its first part: scales, copies or stacks it."""
    is_extreme = isinstance(how, str)
    if how == STACK:
        return Instruction(
            op="aten.stack.default", args=((Ref(part),),), outputs=(total,), node=total
        )
    return Instruction(
        op=CLONE if is_extreme else MULTIPLY,
        args=(Ref(part),) if is_extreme else (Ref(part), how),
        outputs=(total,),
        node=total,
    )


def grown_stack(part: str, total: str) -> tuple[Instruction, Instruction]:
    """Return the instructions that append a part to the stack of a step so far: a view, a copy."""
    row = f"{part}.row"
    args = (Ref(part), 0)
    return (
        Instruction(op="aten.unsqueeze.default", args=args, outputs=(row,), node=total),
        Instruction(op=CAT, args=((Ref(total), Ref(row)),), outputs=(total,), node=total),
    )


class CallLayouts(Protocol):
    """Finds the memory layout of the results of instructions: `sbp_torch.memory.layout.Layouts`."""

    def call(
        self,
        entry: Instruction,
        rank: int,
        read: Callable[[str], Value],
        steps: Sequence[BoxingStep] = (),
    ) -> tuple[ResultLayout | Number, ...]:
        """Return the layout of each output.

        Args:
            entry: The instruction.
            rank: The rank that executes it.
            read: Returns the layout of the value of a key.
            steps: The boxing steps of the plan, which `sbp.local_box` names by index.
        """


class LayoutLibrary(Protocol):
    """The interface of a plugin of kind `tensor_library` that finds memory layouts of results."""

    def call_layouts(self) -> CallLayouts:
        """Return an object that finds the layouts of calls, and caches them from plan to plan."""
        ...
