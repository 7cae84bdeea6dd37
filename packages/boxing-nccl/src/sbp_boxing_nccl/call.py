"""One call of a communicator: what it does, how long it may take, and how its errors read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sbp_core.boxing.step import Step, missing_ranks
from sbp_core.errors import BoxingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, for its messages and its deadline.

    Args:
        step, tag: What is done, and for which firing.
        rank: The rank that does it.
        deadline_s: Seconds that it may wait.
        end_s: When they are over, on the clock of `time.monotonic`.
    """

    step: Step
    tag: str
    rank: int
    deadline_s: float
    end_s: float

    @classmethod
    def begin(cls, step: Step, tag: str, rank: int, deadline_s: float) -> Call:
        """Make a call whose time begins now."""
        end_s = time.monotonic() + deadline_s
        return cls(step=step, tag=tag, rank=rank, deadline_s=deadline_s, end_s=end_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left, above 0."""
        return max(1e-3, self.end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.end_s

    def missing(self, ranks: Iterable[int]) -> BoxingError:
        """Make the error for ranks that did not arrive."""
        return missing_ranks(self.step, self.tag, ranks, self.deadline_s, rank=self.rank)

    def failed(self, why: str) -> BoxingError:
        """Make the error for a call that was cut short."""
        return BoxingError(
            f"boxing step {self.tag!r} could not complete: {why}",
            where=(str(self.step), f"rank {self.rank}"),
            todo="mend what the first of these errors says; then start the run again",
        )
