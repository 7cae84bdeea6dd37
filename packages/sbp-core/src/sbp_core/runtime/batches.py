"""Compute which samples of a batch some ranks hold, so that data loaders load only these.

A batch of a step is the micro-batches in order. Each micro-batch is split over the ranks as the
plan decides, so a rank's part of the batch is its slice of each micro-batch, in their order. Twelve
samples in two micro-batches, split over two ranks:

    sample     0  1  2  3  4  5 |  6  7  8  9 10 11
    rank 0     0  1  2          |  3  4  5              samples 0-2, 6-8
    rank 1              0  1  2 |           3  4  5     samples 3-5, 9-11
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbp_core.boxing import bounds_of
from sbp_core.errors import SbpValueError
from sbp_core.graph import InputKind

if TYPE_CHECKING:
    from sbp_core.compile.physical import PhysicalPlan, StateSlot


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The part of a batch tensor that some ranks hold.

    Args:
        name: The name of the tensor.
        shape, dtype: The shape and dtype of the part: dim 0 are the held samples; other dims are
            whole.
        samples: The position of the part in dim 0 of the batch: disjoint ranges in ascending order;
            empty for a tensor without dims.
        of: The extent of dim 0 of the batch.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    samples: tuple[range, ...]
    of: int

    @property
    def is_whole(self) -> bool:
        """Whether the ranks hold all samples."""
        return sum(map(len, self.samples)) == self.of

    def __str__(self) -> str:
        """Return its samples, such as "samples 0-2, 6-8 of 12"."""
        if self.is_whole:
            return "all samples"
        spans = ", ".join(
            f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in self.samples
        )
        return f"samples {spans} of {self.of}" if spans else f"no samples of {self.of}"


def batch_slots(plan: PhysicalPlan) -> dict[str, StateSlot]:
    """Return a slot (name, shape, layout) of every batch tensor of a plan, by name."""
    return {
        slot.name: slot
        for part in plan.ranks
        for slot in part.slots
        if InputKind(slot.kind) is InputKind.BATCH
    }


def micro_batch_rows(
    plan: PhysicalPlan, slot: StateSlot, ranks: Iterable[int]
) -> tuple[range, ...]:
    """Return the samples of one micro-batch that some ranks hold: disjoint, ascending ranges."""
    if not slot.shape:
        return ()
    assert slot.sbp is not None, "batches are tensors"
    held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
    return _joined(range(*held[rank][0]) for rank in ranks if rank in held)


def batch_parts(plan: PhysicalPlan, ranks: Iterable[int]) -> dict[str, BatchPart]:
    """Return the part of each batch tensor that some ranks hold, by name.

    The process of these ranks passes these parts to `Session.step(batch_is="local")`. Tensors of
    which they hold nothing, because only another stage reads them, are left out.
    """
    ranks, count = tuple(ranks), plan.num_micro_batches
    found = {}
    for name, slot in batch_slots(plan).items():
        if not set(ranks).intersection(plan.stages[slot.stage].rank_list):
            continue
        size = slot.shape[0] if slot.shape else 0
        rows = micro_batch_rows(plan, slot, ranks)
        held = count * sum(map(len, rows))
        found[name] = BatchPart(
            name=name,
            shape=(held, *slot.shape[1:]) if slot.shape else (),
            dtype=slot.dtype,
            samples=_joined(
                range(index * size + span.start, index * size + span.stop)
                for index in range(count)
                for span in rows
            ),
            of=count * size,
        )
    return found


def local_samples(plan: PhysicalPlan, ranks: Iterable[int]) -> tuple[range, ...]:
    """Return the samples of each batch that some ranks hold, for a loader or sampler.

    Args:
        plan: The plan that is run.
        ranks: The ranks, such as those of one process, `Session.local_ranks`.

    Returns:
        Disjoint ranges of sample numbers in the batch, ascending. A tensor that these ranks hold
        whole does not count if another tensor is split. Empty if the ranks read no batch.

    Raises:
        SbpValueError: two tensors of the batch are split in different ways.
    """
    parts = [part for part in batch_parts(plan, ranks).values() if part.shape]
    split = [part for part in parts if not part.is_whole] or parts
    for part in split:
        if part.samples != split[0].samples:
            raise SbpValueError(
                f"the ranks hold different samples of {split[0].name!r} and of {part.name!r}: "
                f"{split[0]}, and {part}",
                accepted="batch tensors that are split in the same way",
                todo="pin them in the same way; or use batch_parts(), which returns each tensor",
            )
    return split[0].samples if split else ()


def _joined(spans: Iterable[range]) -> tuple[range, ...]:
    """Return the union of ranges in ascending order; ranges that touch are merged."""
    found: list[range] = []
    for span in sorted((span for span in spans if span), key=lambda span: span.start):
        if found and span.start <= found[-1].stop:
            found[-1] = range(found[-1].start, max(found[-1].stop, span.stop))
        else:
            found.append(span)
    return tuple(found)
