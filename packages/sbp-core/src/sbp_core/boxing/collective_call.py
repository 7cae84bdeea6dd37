"""`CollectiveCall`: one collective or message that a rank waits for, with its deadline and errors.

Communicators of all backends (NCCL, gloo, MPI, threads) make one for each step that they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sbp_core.boxing.step import BoxingStep
from sbp_core.errors import BoxingError

#: Ranks -> what is known about each of them, one line each.
DescribeRanks = Callable[[Collection[int]], Sequence[str]]


_AFTER_A_FAILURE = (
    "see why that rank failed (its log, its exit code, the kernel's out-of-memory killer), "
    "and start all ranks again"
)


def _nothing_known(ranks: Collection[int]) -> Sequence[str]:
    """Return nothing about any rank."""
    return ()


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One call, for its messages and its deadline; only `restart` changes it.

    Not frozen: there is one for every step that runs, and freezing triples the time to make it.

    Args:
        step, tag: The step, and the firing that it belongs to.
        rank: The rank that makes the call.
        deadline_s: Seconds that it may wait.
        end_s: When its deadline is, on the clock of `time.monotonic`.
        describe_ranks: Called with the ranks that an error names.
    """

    step: BoxingStep
    tag: str
    rank: int
    deadline_s: float
    end_s: float
    describe_ranks: DescribeRanks = field(default=_nothing_known, repr=False)

    @classmethod
    def begin(
        cls,
        step: BoxingStep,
        tag: str,
        rank: int,
        deadline_s: float,
        describe_ranks: DescribeRanks = _nothing_known,
    ) -> CollectiveCall:
        """Make a call whose deadline counts from now."""
        end_s = time.monotonic() + deadline_s
        return cls(step, tag, rank, deadline_s, end_s, describe_ranks)

    def restart(self) -> None:
        """Count the deadline from now: the call began some time ago, and is waited for now."""
        self.end_s = time.monotonic() + self.deadline_s

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.end_s + self.deadline_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, above 0."""
        return max(1e-3, self.end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() >= self.end_s

    def missing(self, ranks: Iterable[int]) -> BoxingError:
        """Make the error for ranks that did not arrive, with what is known about them."""
        ranks = list(ranks)
        return BoxingError(
            f"boxing step {self.tag!r} waited {self.deadline_s:g} s; ranks that did not arrive: "
            f"{', '.join(map(str, ranks))}",
            where=(str(self.step), f"rank {self.rank}", *self.describe_ranks(ranks)),
            todo="see what those ranks were doing: all processes must make the same calls, also to "
            "evaluate or gather states; a larger deadline helps only if those ranks are slow",
        )

    def failed(
        self, why: str, *, todo: str = _AFTER_A_FAILURE, involved: Iterable[int] = ()
    ) -> BoxingError:
        """Make the error for a call that was cut short, with what is known about those ranks."""
        others = [rank for rank in involved if rank != self.rank]
        known = self.describe_ranks(others) if others else ()
        return BoxingError(
            f"boxing step {self.tag!r} could not complete: {why}",
            where=(str(self.step), f"rank {self.rank}", *known),
            todo=todo,
        )
