"""The notes that ranks leave for each other in the store: joining, waiting, failing, leaving.

A note is written when something takes long or goes wrong, never on the fast path of a step. Holds
no tensors and knows no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sbp_boxing_torch._torch_compat import Store
from sbp_core.boxing.call import wait_until

#: Pauses between two looks at the store, in seconds: the first, and the longest.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-4, 0.02


class Board:
    """The notes of one run, as one rank sees them.

    No method waits for another rank, but for `wait_for`. A store that cannot be reached (the
    process that hosts it has ended) counts as a failure of that process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank

    def join(self, group: str) -> None:
        """Note that this rank is ready to connect a group."""
        self._set(f"join/{group}/{self._rank}", "1")

    def not_joined(self, group: str, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that are not ready to connect a group."""
        return [rank for rank in ranks if not self._has(f"join/{group}/{rank}")]

    def wait_at(self, group: str, number: int) -> None:
        """Note that this rank waits at a call, counted from the first, of a group."""
        self._set(f"wait/{group}/{self._rank}", str(number))

    def not_waiting(self, group: str, number: int, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have not come to a call of a group, as far as they noted it."""
        return [
            rank
            for rank in ranks
            if rank != self._rank and int(self._get(f"wait/{group}/{rank}") or -1) < number
        ]

    def announce(self, text: str) -> None:
        """Tell all ranks why this one failed; the first text stays."""
        try:
            if not self._store.check(["failure"]):
                self._store.set("failure", f"rank {self._rank} reported: {text}")
        except RuntimeError:  # the store is gone, and with it whoever would have read this
            return

    def failure(self) -> str | None:
        """Return what the first rank that failed said, or None if none did."""
        try:
            if self._store.check(["failure"]):
                return self._store.get("failure").decode()
        except RuntimeError as error:
            return f"the process that hosts the store cannot be reached: {error}"
        return None

    def leave(self) -> None:
        """Note that this rank needs nobody any more."""
        self._set(f"leave/{self._rank}", "1")

    def all_left(self, ranks: Sequence[int]) -> bool:
        """Say whether nobody needs this rank any more."""
        try:
            return self._store.check([f"leave/{rank}" for rank in ranks])
        except RuntimeError:  # whoever hosts the store leaves last
            return True

    def wait_for(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Look until `done()` says yes or `timeout_s` seconds are over; return the answer."""
        return wait_until(
            done, timeout_s, first_pause_s=_FIRST_PAUSE_S, longest_pause_s=_LONGEST_PAUSE_S
        )

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError:  # seen as a failure by whoever looks next
            return

    def _has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError:
            return False

    def _get(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return ""
