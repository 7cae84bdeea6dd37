"""Prepare the inputs of a step: check the batch, cut the shards of the local ranks, add scalars.

`Feeder` is created when a session starts and computes the slices from the plan. For each step, it
only compares shapes and cuts. All runtimes use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbp_core.boxing import bounds_of
from sbp_core.compile import PhysicalPlan, StateSlot
from sbp_core.errors import SbpTypeError, SbpValueError, nearest
from sbp_core.graph import InputKind
from sbp_core.runtime import BatchIs, BatchPart, batch_parts, batch_slots, micro_batch_rows
from sbp_torch.ops.random import draw_of
from sbp_torch.runtime.state_layout import Values
from sbp_torch.runtime.store import check_tensor

if TYPE_CHECKING:
    from sbp_core.runtime import Number

#: Position of a part in a tensor: a slice for each dim.
_Index = tuple[slice, ...]

#: Advice for nested batches, whose tensors need the names of the plan.
_FLATTEN = "sbp_torch.flatten_batch(batch) makes them from a batch of another form"


class _BatchTensor:
    """One tensor of the batch: its accepted shapes, and the slices of each local rank.

    Args:
        plan: The plan of the step.
        slot: The slot of the tensor: its name, shape, dtype and layout.
        ranks: The local ranks.
        part: The part that the local ranks hold; None if they hold nothing.
    """

    def __init__(
        self, plan: PhysicalPlan, slot: StateSlot, ranks: Sequence[int], part: BatchPart | None
    ) -> None:
        self.slot, self.part, self.count = slot, part, plan.num_micro_batches
        size = slot.shape[0] if slot.shape else 0
        self.shape = (size * self.count, *slot.shape[1:]) if slot.shape else ()
        self.where = "batch"
        if self.count > 1 and slot.shape:
            self.where = f"batch, {self.count} micro-batches of {size}"
        of_ranks = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        self.where_local = f"batch, of which this is the part of {of_ranks}"
        assert slot.sbp is not None, "batches are tensors"
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
        rows = micro_batch_rows(plan, slot, ranks)
        num_rows = sum(map(len, rows))
        #: By rank, for each micro-batch: its slice of the batch, and of the part of this process.
        self.whole_places: dict[int, list[_Index]] = {}
        self.part_places: dict[int, list[_Index]] = {}
        for rank in ranks:
            if rank in held:
                bounds = held[rank]
                before = [range(span.start, min(span.stop, bounds[0][0])) for span in rows]
                self.whole_places[rank] = self._places(bounds, size, 0)
                skipped = bounds[0][0] - sum(map(len, before)) if bounds else 0
                self.part_places[rank] = self._places(bounds, num_rows, skipped)

    def _places(self, bounds: Sequence[tuple[int, int]], size: int, skipped: int) -> list[_Index]:
        """Return the position of a slice in each micro-batch of `size` samples."""
        if not bounds:
            return [()] * self.count
        (start, stop), *others = bounds
        rest = [slice(*other) for other in others]
        offsets = [index * size - skipped for index in range(self.count)]
        return [(slice(start + offset, stop + offset), *rest) for offset in offsets]

    def _check_values(self, value: object) -> None:
        """Check that a tensor is dense and has values."""
        if isinstance(value, Tensor) and (value.is_meta or value.layout is not torch.strided):
            what = "on the device 'meta'" if value.is_meta else f"of layout {value.layout}"
            raise SbpValueError(
                f"{self.slot.name!r} is {what}",
                where=self.where,
                accepted="dense tensors with values",
                todo="" if value.is_meta else "make it dense: .to_dense()",
            )

    def check_whole(self, value: object) -> None:
        """Check a value that has to be the whole tensor."""
        self._check_values(value)
        is_part = self.part is not None and _shape(value) == self.part.shape
        todo = "batch_is='local' takes the part of this process" if is_part else ""
        check_tensor(self.slot.name, value, self.shape, self.slot.dtype, self.where, todo=todo)

    def check_part(self, value: object) -> None:
        """Check a value that has to be the part of the local ranks."""
        assert self.part is not None, "they hold some of it"
        self._check_values(value)
        is_whole = _shape(value) == self.shape != self.part.shape
        check_tensor(
            self.slot.name,
            value,
            self.part.shape,
            self.part.dtype,
            self.where_local,
            why=str(self.part) if self.part.shape else "",
            todo="this is the whole batch, which batch_is='global' takes" if is_whole else "",
        )


class Feeder:
    """Cuts the shards of the local ranks from the batch of each step.

    Args:
        plan: The plan of the steps.
        ranks: The local ranks.
    """

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int]) -> None:
        self.ranks, self.count = tuple(ranks), plan.num_micro_batches
        parts = batch_parts(plan, self.ranks)
        self.tensors = {
            name: _BatchTensor(plan, slot, self.ranks, parts.get(name))
            for name, slot in batch_slots(plan).items()
        }
        self.scalars = self._names(plan, InputKind.SCALAR)
        self.draws = self._names(plan, InputKind.RNG)

    @staticmethod
    def _names(plan: PhysicalPlan, kind: InputKind) -> tuple[str, ...]:
        """Return the host inputs of a kind, which every rank has."""
        slots = (slot for part in plan.ranks for slot in part.slots)
        return tuple(dict.fromkeys(slot.name for slot in slots if InputKind(slot.kind) is kind))

    def feed(
        self,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        batch_is: BatchIs = "global",
    ) -> dict[int, list[Values]]:
        """Return, for each local rank, the batch parts and scalars of every micro-batch.

        Raises:
            SbpTypeError: the batch is no mapping, an entry is no tensor, or a scalar is no number.
            SbpValueError: a tensor or scalar is missing, or of another shape or dtype; the plan has
                no input of that name; or `batch_is` is neither `global` nor `local`.
        """
        if batch_is not in ("global", "local"):
            raise SbpValueError(f"batch_is={batch_is!r}", accepted="'global', 'local'")
        _check_is_mapping("batch", batch, "tensors by the names of the batch inputs", _FLATTEN)
        _check_is_mapping("scalars", scalars, "numbers by the names of the scalar inputs", "")
        self._check_names(batch)
        self._check_scalars(scalars)
        numbers: Values = {name: scalars[name] for name in self.scalars}
        fed: dict[int, list[Values]] = {
            rank: [
                numbers | {name: draw_of(scalars, self.count, index) for name in self.draws}
                for index in range(self.count)
            ]
            for rank in self.ranks
        }
        for name, tensor in self.tensors.items():
            value = batch.get(name)
            if batch_is == "global":
                tensor.check_whole(value)
            elif tensor.part is not None:
                tensor.check_part(value)
            places = tensor.whole_places if batch_is == "global" else tensor.part_places
            # Ranks with equal slices share a tensor.
            pieces: dict[tuple[tuple[int, int], ...], Tensor] = {}
            for rank, indices in places.items():
                assert value is not None, "what a rank holds was checked"
                for index, place in enumerate(indices):
                    key = tuple((part.start, part.stop) for part in place)
                    if key not in pieces:
                        pieces[key] = value[place].contiguous()
                    fed[rank][index][name] = pieces[key]
        return fed

    def _check_names(self, batch: Mapping[str, object]) -> None:
        """Refuse entries that no rank would read. None values are ignored, as in capture."""
        for name, value in batch.items():
            if name in self.tensors or value is None:
                continue
            todo = "leave it out"
            if near := nearest(str(name), self.tensors):
                todo = f"did you mean {near!r}? If not, leave it out"
            elif isinstance(value, Mapping | Sequence):
                todo = _FLATTEN
            missing = [one for one in self.tensors if one not in batch]
            more = f", and the batch has no {missing[0]!r}" if missing else ""
            raise SbpValueError(
                f"the plan has no input {name!r}{more}",
                where="batch",
                accepted=", ".join(self.tensors),
                todo=todo,
            )

    def _check_scalars(self, scalars: Mapping[str, object]) -> None:
        for name in self.scalars:
            if name not in scalars:
                wanted = ", ".join(sorted(self.scalars))
                raise SbpValueError(
                    f"scalar {name!r} is missing",
                    accepted=f"a number for every scalar input: {wanted}",
                )
            value = scalars[name]
            if not isinstance(value, Real):
                raise SbpTypeError(
                    f"scalar {name!r} is of type {type(value).__name__}",
                    accepted="a number of Python",
                    todo="a tensor of one element has .item()" if torch.is_tensor(value) else "",
                )


def _check_is_mapping(what: str, value: object, accepted: str, todo: str) -> None:
    if not isinstance(value, Mapping):
        raise SbpTypeError(
            f"{what} is of type {type(value).__name__}",
            accepted=f"a mapping: {accepted}",
            todo=todo,
        )


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
