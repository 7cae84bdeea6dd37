"""A control store for connections whose ranks never meet."""

from __future__ import annotations

from collections.abc import Iterable

from sbp_core.processes import ControlStore


class NoControlStore(ControlStore):
    """Forgets whatever is written."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _put(self, key: str, value: str, ranks: Iterable[int]) -> None:
        """Nobody reads it."""

    def _get(self, key: str) -> str | None:
        return None

    def _delete(self, key: str) -> None:
        """There is nothing."""
