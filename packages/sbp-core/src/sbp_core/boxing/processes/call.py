"""One call of a communicator: what it does, how long it may take, and how its errors read.

Also the names by which the ranks of several processes agree on a group and on a tag, and the one
loop that waits by looking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from sbp_core.boxing.step import BoxingStep, missing_ranks
from sbp_core.errors import BoxingError

#: Ranks -> what is known about each of them, one a line.
DescribeRanks = Callable[[Collection[int]], Sequence[str]]


_AFTER_A_FAILURE = (
    "see why that rank failed (its log, its exit code, the kernel's out-of-memory killer), "
    "and start all ranks again"
)


def _nothing_known(ranks: Collection[int]) -> Sequence[str]:
    """Say nothing about any rank."""
    return ()


@dataclass(slots=True, eq=False)
class CollectiveCall:
    """One call, for its messages and its deadline; only `restart` changes it.

    Not frozen: there is one for every step that runs, and freezing triples the time to make it.

    Args:
        step, tag: What is done, and for which firing.
        rank: The rank that does it.
        deadline_s: Seconds that it may wait.
        end_s: When they are over, on the clock of `time.monotonic`.
        describe_ranks: Asked about the ranks that an error names.
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
        """Make a call whose time begins now."""
        end_s = time.monotonic() + deadline_s
        return cls(step, tag, rank, deadline_s, end_s, describe_ranks)

    def restart(self) -> None:
        """Let its time begin anew: it was begun some while ago, and is waited for from now on."""
        self.end_s = time.monotonic() + self.deadline_s

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.end_s + self.deadline_s

    @property
    def left_s(self) -> float:
        """Seconds that are left, above 0."""
        return max(1e-3, self.end_s - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.end_s

    def missing(self, ranks: Iterable[int]) -> BoxingError:
        """Make the error for ranks that did not arrive, with what is known about them."""
        ranks = list(ranks)
        error = missing_ranks(self.step, self.tag, ranks, self.deadline_s, rank=self.rank)
        return BoxingError(
            error.what, where=(*error.where, *self.describe_ranks(ranks)), todo=error.todo
        )

    def failed(
        self, why: str, *, todo: str = _AFTER_A_FAILURE, involved: Iterable[int] = ()
    ) -> BoxingError:
        """Make the error for a call that was cut short, with what is known about the involved."""
        others = [rank for rank in involved if rank != self.rank]
        known = self.describe_ranks(others) if others else ()
        return BoxingError(
            f"boxing step {self.tag!r} could not complete: {why}",
            where=(str(self.step), f"rank {self.rank}", *known),
            todo=todo,
        )


def wait_until(
    done: Callable[[], bool], limit_s: float, *, first_pause_s: float, longest_pause_s: float
) -> bool:
    """Look until `done()` says yes or the time is over; return the answer.

    Args:
        done: Asked at least once; what it raises is passed on.
        limit_s: Seconds to look.
        first_pause_s: Seconds between the first two looks; each pause is twice the one before.
        longest_pause_s: Seconds that no pause exceeds.
    """
    end, pause = time.monotonic() + limit_s, first_pause_s
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, longest_pause_s)
    return True


def group_name(ranks: tuple[int, ...]) -> str:
    """Return how the ranks of a group call it among themselves."""
    return "-".join(map(str, ranks))


def tag_number(tag: str, upper: int) -> int:
    """Return the number, in [0, upper), that stands for a tag on every rank.

    Transports take numbers for tags, and a hash of the text needs no agreement between the ranks.
    That two tags share a number does harm only if both are under way between the same two ranks,
    and are received in another order than they were sent in.
    """
    return int.from_bytes(blake2b(tag.encode(), digest_size=8).digest(), "big") % upper
