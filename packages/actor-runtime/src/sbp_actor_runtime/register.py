"""Registers as an actor's thread sees them: fillings to read, and credits to fill.

Counts are cumulative over steps. A register is filled by one actor and read by several; its credit
comes back when every reader has given an acknowledgement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

Values = dict[str, Any]


class InRegister:
    """The reading end, for one consumer: fillings in the order in which they came."""

    __slots__ = ("fillings", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.fillings: deque[Values] = deque()


class OutRegister:
    """The filling end: how many fillings each consumer has acknowledged."""

    __slots__ = ("acknowledged", "filled", "name", "quota")

    def __init__(self, name: str, quota: int, consumers: Iterable[str]) -> None:
        self.name = name
        self.quota = quota
        self.filled = 0
        self.acknowledged = dict.fromkeys(consumers, 0)

    @property
    def has_credit(self) -> bool:
        """Whether another filling may be made."""
        return self.filled - min(self.acknowledged.values()) < self.quota

    def slowest(self) -> str:
        """Return the consumer that the credit waits for."""
        return min(self.acknowledged, key=self.acknowledged.__getitem__)
