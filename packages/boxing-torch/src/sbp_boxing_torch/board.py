"""The notes of the ranks in the store that all of them reach."""

from __future__ import annotations

from collections.abc import Iterable

from sbp_boxing_torch._torch_compat import Store
from sbp_boxing_torch.clerk import Clerk
from sbp_core.boxing.processes.board import Board


class StoreBoard(Board):
    """Notes in a store of torch.distributed, which any rank may read at any time.

    Args:
        store: A part of it that nobody else writes to.
        rank: The rank that looks.
        size: Number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._clerk = Clerk(store)

    def close(self) -> None:
        """Let go of the store; nothing may be asked any more."""
        self._clerk.close()

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        self._clerk.set(key, value)

    def _get(self, key: str) -> str | None:
        return self._clerk.get(key)

    def _has_all(self, keys: Iterable[str]) -> bool:
        return self._clerk.has_all(list(keys))
