"""How a tensor is laid out in memory, as values: strides, storage, offset; and who knows that.

How the results of operators lie is known to the tensor library, by its plugin.
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
from sbp_core.graph.primitives import CLONE, MULTIPLY

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
        """Whether its elements lie row by row without gaps."""
        wanted = contiguous(self.shape, self.dtype).strides
        dims = zip(self.shape, self.strides, wanted, strict=True)
        return not self.size_bytes or all(n == 1 or one == other for n, one, other in dims)


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor in one of the numbered storages of a rank."""

    layout: StridedLayout
    storage: int
    storage_bytes: int


#: What memory knows of a value: how it lies, or a host number itself.
Value = StorageView | Number


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """How one result of an instruction is laid out in memory, and on whose storage.

    Args:
        layout: How, in its storage.
        source: Which argument's storage it is in, counted over distinct argument names; -1 if in
            a new one.
        fresh: Which of the instruction's new storages; -1 if in none.
        storage_bytes: Of that storage.
    """

    layout: StridedLayout
    source: int
    fresh: int
    storage_bytes: int


def contiguous(shape: tuple[int, ...], dtype: str) -> StridedLayout:
    """Return how a contiguous tensor is laid out at the start of its storage."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return StridedLayout(shape, tuple(strides), 0, dtype)


def number_of(slot: StateSlot) -> Number:
    """Return a number for a slot of one; which does not matter, because no layout depends on it."""
    return 1 if slot.dtype.startswith(("int", "bool")) else 1.0


def placed(
    found: Sequence[ResultLayout | Number],
    given: Sequence[Value],
    new: Callable[[int, ResultLayout], StorageView],
) -> list[Value]:
    """Return the results of an instruction as values.

    Three kinds: a number of the host, a look at an argument's storage, and a new storage, of which
    several results may have a part each (`ResultLayout.fresh` numbers them).

    Args:
        found: How they lie.
        given: The arguments, by distinct names.
        new: Makes a storage for a result, whose number comes first.
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
    """Return what makes a sum of its first part: it is scaled, or copied for an extreme."""
    is_extreme = isinstance(how, str)
    return Instruction(
        op=CLONE if is_extreme else MULTIPLY,
        args=(Ref(part),) if is_extreme else (Ref(part), how),
        outputs=(total,),
        node=total,
    )


class CallLayouts(Protocol):
    """Knows the memory layout of the results of instructions: `sbp_torch.memory.layout.Layouts`."""

    def call(
        self,
        entry: Instruction,
        rank: int,
        read: Callable[[str], Value],
        steps: Sequence[BoxingStep] = (),
    ) -> tuple[ResultLayout | Number, ...]:
        """Return how each output lies.

        Args:
            entry: The instruction.
            rank: Who executes it.
            read: How the value of a key lies.
            steps: The boxing steps of the plan, which `sbp.local_box` names by index.
        """


class LayoutLibrary(Protocol):
    """Of a plugin of kind `tensor_library`: knows the layout of results of operators in memory."""

    def call_layouts(self) -> CallLayouts:
        """Return what learns the layouts of calls, and remembers them from plan to plan."""
        ...
