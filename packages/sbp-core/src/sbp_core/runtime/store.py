"""What one rank holds between steps; how whole tensors become parts, and parts whole.

Both runtimes use it, so feeding, loading and saving are in one place. Knows torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbp_core.boxing.execute import assemble, shard
from sbp_core.compile.physical import PhysicalPlan, StateSlot
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import InputKind

if TYPE_CHECKING:
    from sbp_core.runtime.contract import Number

Values = dict[str, "Tensor | Number"]


class StateStore:
    """The states of all local ranks, by rank and name."""

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int]) -> None:
        self.plan = plan
        self.values: dict[int, Values] = {rank: {} for rank in ranks}
        #: Of the states that a host number stands for, as they were last given.
        self.tied_dtypes: dict[str, torch.dtype] = {}

    def slots(self) -> dict[str, StateSlot]:
        """Return one slot of every state of the plan, by name."""
        return {
            slot.name: slot
            for part in self.plan.ranks
            for slot in part.slots
            if InputKind(slot.kind).is_state
        }

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Cut whole states into every local rank's parts.

        Raises:
            SbpValueError: a state is missing, unknown, or of another shape or dtype; tied states
                differ.
        """
        slots = self.slots()
        given = dict(states)
        new: dict[int, Values] = {rank: {} for rank in self.values}
        dtypes: dict[str, torch.dtype] = {}
        for name, slot in slots.items():
            if slot.sbp is None:
                number = self._tied_number(name, given, dtypes)
                for values in new.values():
                    values[name] = number
                continue
            whole = given.pop(name, None)
            _check_tensor(name, whole, slot.shape, slot.dtype)
            assert whole is not None, "checked above"
            for rank, part in shard(whole.detach(), self.plan.stages[slot.stage], slot.sbp).items():
                if rank in new:
                    new[rank][name] = part.clone()
        if given:
            raise SbpValueError(
                f"the plan has no state called {sorted(given)[0]!r}",
                accepted=", ".join(sorted(slots)[:6]) + ", ...",
            )
        self.values, self.tied_dtypes = new, dtypes

    def _tied_number(
        self, name: str, given: dict[str, Tensor], dtypes: dict[str, torch.dtype]
    ) -> Number:
        """Take the host number that several equal states stand for, and note their dtypes."""
        found: dict[str, Number] = {}
        for tied in self.plan.ties.get(name, (name,)):
            value = given.pop(tied, None)
            if value is None or value.numel() != 1:
                shape = "" if value is None else f" of shape {tuple(value.shape)}"
                raise SbpValueError(
                    f"{tied!r} is{shape or ' missing'}", accepted="one number: a 0-d tensor"
                )
            found[tied], dtypes[tied] = value.item(), value.dtype
        if len(set(found.values())) != 1:
            raise SbpValueError(
                f"the states tied into {name!r} are not one number: {found}",
                accepted="equal step counters on all parameters",
            )
        return next(iter(found.values()))

    def whole(self) -> dict[str, Tensor]:
        """Return every state as a whole tensor; tied ones under each of their names."""
        found: dict[str, Tensor] = {}
        for name, slot in self.slots().items():
            parts = {rank: values[name] for rank, values in self.values.items() if name in values}
            if slot.sbp is None:
                number = next(iter(parts.values()))
                for tied in self.plan.ties.get(name, (name,)):
                    found[tied] = torch.tensor(number, dtype=self.tied_dtypes[tied])
                continue
            stage = self.plan.stages[slot.stage]
            tensors = {rank: part for rank, part in parts.items() if isinstance(part, Tensor)}
            found[name] = assemble(tensors, stage, slot.sbp, slot.shape).clone()
        return found


def feed(
    plan: PhysicalPlan,
    batch: Mapping[str, Tensor],
    scalars: Mapping[str, Number],
    ranks: Iterable[int],
) -> dict[int, list[Values]]:
    """Return, for each rank, the batch parts and scalars of every micro-batch.

    Raises:
        SbpValueError: a tensor or scalar is missing, or of another shape or dtype.
    """
    count = plan.num_micro_batches
    fed: dict[int, list[Values]] = {rank: [{} for _ in range(count)] for rank in ranks}
    done: set[str] = set()
    for part in plan.ranks:
        for slot in part.slots:
            kind = InputKind(slot.kind)
            if kind is InputKind.SCALAR:
                if slot.name not in scalars:
                    raise SbpValueError(
                        f"scalar {slot.name!r} is missing",
                        accepted="a number for every scalar input",
                    )
                if part.rank in fed:
                    for values in fed[part.rank]:
                        values[slot.name] = scalars[slot.name]
            elif kind is InputKind.BATCH and slot.name not in done:
                done.add(slot.name)
                _feed_tensor(plan, slot, batch.get(slot.name), fed)
    return fed


def _feed_tensor(
    plan: PhysicalPlan, slot: StateSlot, whole: Tensor | None, fed: dict[int, list[Values]]
) -> None:
    count = plan.num_micro_batches
    shape = (slot.shape[0] * count, *slot.shape[1:]) if slot.shape else slot.shape
    _check_tensor(slot.name, whole, shape, slot.dtype)
    assert whole is not None and slot.sbp is not None, "checked above"
    stage = plan.stages[slot.stage]
    micro_batches = torch.split(whole, slot.shape[0]) if slot.shape else (whole,) * count
    for index, micro in enumerate(micro_batches):
        for rank, piece in shard(micro, stage, slot.sbp).items():
            if rank in fed:
                fed[rank][index][slot.name] = piece


def _check_tensor(name: str, value: Tensor | None, shape: Sequence[int], dtype: str) -> None:
    wanted = f"{dtype} of shape {tuple(shape)}"
    if value is None:
        raise SbpValueError(f"{name!r} is missing", accepted=wanted)
    if tuple(value.shape) != tuple(shape) or str(value.dtype) != f"torch.{dtype}":
        raise SbpValueError(
            f"{name!r} is {value.dtype} of shape {tuple(value.shape)}", accepted=wanted
        )
