"""Registers as an actor's thread sees them: fillings to read, and credits to fill.

Counts are cumulative over steps. A register is filled by one actor and read by several; its credit
comes back when every reader has given an acknowledgement. A register that carries states begins a
step with fillings that hold the states themselves, and ends it with as many that nobody has read;
neither are handed over.

    quota 2, readers a and b     filled  a  b   live  credit
    fill                              1  0  0      1  yes
    fill                              2  0  0      2  no
    a acknowledges                    2  1  0      2  no
    b acknowledges                    2  1  1      1  yes
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from sbp_actor_runtime.message import PendingResult, ThreadId, Values, value_of


class InRegister:
    """The reading end, for one consumer: fillings in the order in which they came.

    Args:
        name: Of the register.
        producer: The thread that fills it, which acknowledgements go to.
        carries: Of a register that carries states, the key of each by name.
        initial: How many fillings hold the states themselves.
        uses: How many firings of the consumer read each filling.
        is_begun: Whether a collective fills it when it begins: its value may be in flight.
    """

    __slots__ = ("carries", "fillings", "initial", "is_begun", "name", "producer", "uses")

    def __init__(
        self,
        name: str,
        producer: ThreadId,
        carries: Mapping[str, str] | None = None,
        *,
        initial: int = 0,
        uses: int = 1,
        is_begun: bool = False,
    ) -> None:
        self.name = name
        self.producer = producer
        self.is_begun = is_begun
        self.uses = uses
        self.carries = dict(carries or {})
        self.initial = initial
        self.fillings: deque[Values] = deque()

    def has_filling(self, index: int) -> bool:
        """Whether there is something for a firing to read: for the first ones, states are."""
        return bool(self.fillings) or index // self.uses < self.initial

    def is_last_use(self, index: int) -> bool:
        """Whether no later firing reads what this one does."""
        return self.uses == 1 or (index + 1) % self.uses == 0

    def open(self, index: int) -> Iterable[PendingResult]:
        """Return what is in flight of the values for a firing to read."""
        if not self.is_begun or index // self.uses < self.initial:
            return ()
        values = self.fillings[0].values()
        return [value for value in values if isinstance(value, PendingResult) and value.is_open]

    def take(self, index: int) -> Values:
        """Return the values for a firing to read; of carried states, none for the first ones."""
        if index // self.uses < self.initial:
            return {}
        values = self.fillings.popleft() if self.is_last_use(index) else self.fillings[0]
        if self.is_begun:
            values = {key: value_of(value) for key, value in values.items()}
        if not self.carries:
            return values
        return {name: values[key] for name, key in self.carries.items()}


class OutRegister:
    """The filling end: how many fillings each consumer has acknowledged.

    Args:
        name: Of the register or link.
        quota: Fillings that may be alive, >= 1.
        consumers: The thread of each actor that reads it.
        keys: The values that one filling holds; none for a link.
        initial: How many fillings there are to begin with, of one that carries states.
        num_taken: How many that are made in a step are read in it; None for all.
        firings: How many firings of the producer make a filling.
    """

    __slots__ = (
        "acknowledged", "consumers", "filled", "firings", "initial", "keys", "name", "num_taken",
        "quota", "read",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        quota: int,
        consumers: Mapping[str, ThreadId],
        keys: tuple[str, ...] = (),
        *,
        initial: int = 0,
        num_taken: int | None = None,
        firings: int = 1,
    ) -> None:
        self.name = name
        self.quota = quota
        self.consumers = tuple(consumers.items())
        self.keys = keys
        self.initial = initial
        self.num_taken = num_taken
        self.firings = firings
        self.filled = initial
        self.read = 0
        self.acknowledged = dict.fromkeys(consumers, 0)

    @property
    def has_credit(self) -> bool:
        """Whether another filling may be made."""
        return self.filled - self.read < self.quota

    def is_filled_by(self, index: int) -> bool:
        """Whether a firing of its producer is one that fills it."""
        return (index + 1) % self.firings == 0

    def is_taken_of(self, index: int) -> bool:
        """Whether somebody reads, in this step, what a firing of its producer fills it with."""
        return self.num_taken is None or index // self.firings < self.num_taken

    def fill(self) -> None:
        """Take a credit."""
        assert self.has_credit, f"{self.name} is full"
        self.filled += 1

    def acknowledge(self, consumer: str) -> None:
        """Note that a consumer is through with its oldest filling.

        Of a link this may come before the filling: a receiver does not wait for a sender that has
        nothing for it.
        """
        self.acknowledged[consumer] += 1
        self.read = min(self.acknowledged.values())

    def slowest(self) -> str:
        """Return the consumer that the credit waits for."""
        return min(self.acknowledged, key=self.acknowledged.__getitem__)
