"""Variants of a step: ways to write it that compute the same, with different time and memory.

    variant     micro-batches    recomputed                 operators in slices
    (as given)  1                -                          -
    ...         4                to at most 2 GB            head.weight in 4, along its output

A planner that chooses among them gets a `GraphFamily` (`PlanRequest.family`), requests graphs from
it, and names the chosen variant in its strategy. The family decides which passes make the graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import LogicalGraph

__all__ = ["GraphFamily", "GraphVariant", "OperatorSlices", "SliceAlong"]


class SliceAlong(StrEnum):
    """The dims along which an operator is sliced: of its output, or the dim that is summed over."""

    OUTPUT = "output"
    CONTRACTION = "contraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSlices:
    """The number of slices in which the operators of some parameters run.

    Args:
        pattern: A pattern of names of parameters or modules, as for `fnmatch`.
        count: The number of slices, >= 2.
        along: What a slice is a part of: the output, or the dim that is summed over.

    Raises:
        SbpValueError: there are fewer than two slices.
    """

    pattern: str
    count: int
    along: SliceAlong = SliceAlong.OUTPUT

    def __post_init__(self) -> None:
        if self.count < 2:
            raise SbpValueError(f"{self.count} slices of {self.pattern!r}", accepted="2 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphVariant:
    """One way to write a step.

    Args:
        num_micro_batches: The micro-batches of one step, >= 1.
        recompute_bytes: The most bytes of activations of one micro-batch, of whole logical tensors,
            that the backward phase may hold; further activations are recomputed. None: only those
            are recomputed that the model and the settings name.
        slices: Operators that run in slices, with their parameters gathered slice by slice.
        splits_classes: Whether cross-entropies over many classes are rewritten to be splittable.

    Raises:
        SbpValueError: a number is out of range.
    """

    num_micro_batches: int = 1
    recompute_bytes: float | None = None
    slices: tuple[OperatorSlices, ...] = ()
    splits_classes: bool = True

    def __post_init__(self) -> None:
        budget = self.recompute_bytes
        if self.num_micro_batches < 1 or (budget is not None and not budget >= 0):
            raise SbpValueError(
                f"num_micro_batches={self.num_micro_batches}, recompute_bytes={budget}",
                accepted="micro-batches from 1, bytes from 0 or None",
            )


class GraphFamily(Protocol):
    """The variants of one step."""

    @property
    def variant(self) -> GraphVariant:
        """The requested variant, which is the variant of `PlanRequest.graph`."""
        ...

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The numbers of micro-batches that a planner may choose; a single one if it is fixed."""
        ...

    @property
    def may_recompute(self) -> bool:
        """Whether a planner may set `recompute_bytes`."""
        ...

    @property
    def may_slice(self) -> bool:
        """Whether a planner may set `slices`."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of a step, summed over all its micro-batches."""
        ...

    def with_batch(self, batch_size: int) -> GraphFamily:
        """Return the variants of the step with another number of samples, to compare them.

        Raises:
            SbpError: the fixed number of micro-batches does not divide the samples.
        """
        ...

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        """Return the graph of a variant; the same object for each call.

        Raises:
            SbpError: there is no such variant, such as for a memory budget that is too small.
        """
        ...
