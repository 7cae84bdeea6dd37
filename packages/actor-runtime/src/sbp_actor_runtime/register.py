"""The two ends of a register (buffer between actors): the reader's fillings, the writer's credits.

Counts are cumulative over steps. One actor fills a register and several read it. A credit (the
right to fill one place) comes back when every reader has acknowledged. A register that carries
states begins a step with fillings that stand for the states themselves, and ends it with as many
unread ones; neither are sent.

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
    """The reading end, for one consumer: fillings in order of arrival.

    Args:
        name: Name of the register.
        producer: The thread that fills it and gets the acknowledgements.
        carries: Name of each carried state -> its key, for a register that carries states.
        initial: Number of fillings that stand for the states themselves.
        uses: Number of firings of the consumer that read each filling.
        is_begun: Whether a collective fills it at its start, with results that are still in flight.
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
        """Whether a firing has its input; the first firings read the states."""
        return bool(self.fillings) or index // self.uses < self.initial

    def is_last_use(self, index: int) -> bool:
        """Whether no later firing reads the same filling."""
        return self.uses == 1 or (index + 1) % self.uses == 0

    def open(self, index: int) -> Iterable[PendingResult]:
        """Return those inputs of a firing that are still in flight."""
        if not self.is_begun or index // self.uses < self.initial:
            return ()
        values = self.fillings[0].values()
        return [value for value in values if isinstance(value, PendingResult) and value.is_open]

    def take(self, index: int) -> Values:
        """Return the inputs of a firing; without carried states for the first firings."""
        if index // self.uses < self.initial:
            return {}
        values = self.fillings.popleft() if self.is_last_use(index) else self.fillings[0]
        if self.is_begun:
            values = {key: value_of(value) for key, value in values.items()}
        if not self.carries:
            return values
        return {name: values[key] for name, key in self.carries.items()}


class OutRegister:
    """The filling end: counts the fillings, and the acknowledgements of each consumer.

    Args:
        name: Name of the register or link.
        quota: Fillings that may be alive, >= 1.
        consumers: Actor that reads it -> its thread.
        keys: The values that one filling holds; none for a link.
        initial: Number of fillings at the beginning, for a register that carries states.
        num_taken: Number of a step's fillings that are read in the same step; None for all.
        firings: Number of firings of the producer for one filling.
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
        """Whether this firing of its producer fills it."""
        return (index + 1) % self.firings == 0

    def is_taken_of(self, index: int) -> bool:
        """Whether the filling by this firing of its producer is read in the same step."""
        return self.num_taken is None or index // self.firings < self.num_taken

    def fill(self) -> None:
        """Take a credit."""
        assert self.has_credit, f"{self.name} is full"
        self.filled += 1

    def acknowledge(self, consumer: str) -> None:
        """Note that a consumer is finished with its oldest filling.

        For a link, this may come before the filling: a receiver does not wait for a sender that has
        nothing for it.
        """
        self.acknowledged[consumer] += 1
        self.read = min(self.acknowledged.values())

    def slowest(self) -> str:
        """Return the consumer with the fewest acknowledgements, which holds up the credit."""
        return min(self.acknowledged, key=self.acknowledged.__getitem__)
