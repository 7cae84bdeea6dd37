"""States as they were between two steps, to be read while later steps run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbp_core.runtime.ownership import StatePiece, StateSlice


class Snapshot(ABC):
    """What the local ranks own of the states, as it was when `Session.snapshot` was called.

    Any thread may read it, also when the session has gone on, has failed or is closed. Use it as a
    context manager: `release` hands its memory to the next snapshot.

    Args:
        steps_done: The steps that the session had done.
    """

    steps_done: int

    @abstractmethod
    def slices(self) -> Sequence[StateSlice]:
        """Return what `pieces` yields, in its order, without the values; waits for nothing.

        Those of larger elements come first, so that all are aligned where they lie without gaps.
        """

    @abstractmethod
    def pieces(self) -> Iterator[StatePiece]:
        """Yield what `Session.pieces` would have yielded, in the order in which it is overwritten.

        Waits for each piece until it is copied. Values that were copied lie in the memory of the
        host; the others, which nothing overwrites, where they are. They hold until `release`.

        Of a snapshot with a limit, each holds until the next is asked for, and they are read once:
        what has been read makes room for other copies. What was not copied for want of room is read
        where it is, and its update waits.

        Raises:
            RunError: a value could not be copied, such as for lack of memory: the session goes on,
                and this snapshot is of no use; or it was released, or has a limit and was read.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of all values; what is not yet copied no longer is. Safe to call twice."""

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
