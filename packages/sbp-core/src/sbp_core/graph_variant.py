"""Variants of a step: the ways to write it that compute the same, and differ in time and memory.

    variant     micro-batches    recomputed                 operators in slices
    (as given)  1                -                          -
    ...         4                to at most 2 GB            head.weight in 4, along its output

A planner that chooses among them gets a `GraphFamily` (`PlanRequest.family`), asks it for graphs,
and names the variant that it has decided for in its strategy. Which passes make them is the
business of who makes the family.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import LogicalGraph

__all__ = ["GraphFamily", "GraphVariant", "OperatorSlices", "SliceAlong"]


class SliceAlong(StrEnum):
    """What the slices of an operator are."""

    OUTPUT = "output"
    CONTRACTION = "contraction"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSlices:
    """In how many slices the operators of some parameters run.

    Args:
        pattern: Of parameters or modules, as of `fnmatch`.
        count: Slices, >= 2.
        along: What a slice is: a part of the output, or of what is summed over.

    Raises:
        SbpValueError: there are fewer than two.
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
        num_micro_batches: Of one step, >= 1.
        recompute_bytes: The most bytes of activations of one micro-batch, of whole logical tensors,
            that the backward phase may hold; what does not fit is made again. None: what the model
            and the settings say is recomputed, and nothing else.
        slices: Operators that run in slices, their parameters gathered slice by slice.
        splits_classes: Whether cross-entropies over many classes are written so that their classes
            may be split, where they are many enough.

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
        """The variant that is asked for, and that `PlanRequest.graph` is of."""
        ...

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """The numbers of micro-batches that a planner may choose; one if it is settled."""
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
        """Samples of a step, of all its micro-batches together."""
        ...

    def with_batch(self, batch_size: int) -> GraphFamily:
        """Return the variants of the step on another number of samples, to compare them.

        Raises:
            SbpError: they do not divide into the micro-batches that are settled.
        """
        ...

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        """Return the graph of a variant; asked for again, the same one.

        Raises:
            SbpError: there is no such variant, such as of a budget that nothing can keep to.
        """
        ...
