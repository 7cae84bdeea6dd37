"""How many bytes a rank hands to its transport's collectives for other ranks: counted, not derived.

Beside each call of a library stands a call of the counter, which is given the size of the very
buffer that the library is given: padding, wider dtypes and copies count. Ranks that are threads
have no library: there it is given the slices of shards that results are made of (`boxing.share`).
The counter knows nothing of steps, so that what is counted can be compared with what was predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.sbp import split_bounds


class TrafficCounter:
    """The bytes of one rank in one group.

    What a library does inside is its own affair: a collective counts as its definition says.

    | the library is asked for | and counts |
    |---|---|
    | exchange | the chunks for other ranks |
    | all-gather | the part, once for each other rank |
    | reduce-scatter | the addends of the other ranks' parts |
    | all-reduce | that, and the sum of the rank's own part, once for each other rank |

    Args:
        num_ranks: Of the group.
        place: Of the rank in it.
    """

    __slots__ = ("_bytes", "_num_ranks", "_place")

    def __init__(self, num_ranks: int, place: int) -> None:
        self._num_ranks, self._place = num_ranks, place
        self._bytes = 0

    def exchange(self, sizes: Sequence[int], item_bytes: int = 1) -> None:
        """Count chunks of some elements, chunk i for the i-th rank of the group."""
        size_bytes = item_bytes * (sum(sizes) - sizes[self._place])
        self._bytes += size_bytes

    def even_exchange(self, size_bytes: int) -> None:
        """Count as many bytes for each rank, this one included; or a reduce-scatter of them."""
        self._bytes += size_bytes - size_bytes // self._num_ranks

    def all_gather(self, part_bytes: int) -> None:
        """Count a part that each rank gets."""
        self._bytes += part_bytes * (self._num_ranks - 1)

    def all_reduce(self, elements: int, item_bytes: int) -> None:
        """Count values that are reduced in parts, the i-th by the i-th rank, for all."""
        start, stop = split_bounds(elements, self._num_ranks, self._place)
        self._bytes += item_bytes * (elements + (self._num_ranks - 2) * (stop - start))

    def take(self) -> int:
        """Return the bytes since the last time."""
        taken, self._bytes = self._bytes, 0
        return taken
