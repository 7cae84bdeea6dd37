"""`MicroBatches`: the argument of `parallelize` that says how a step is cut into micro-batches."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from sbp_core.errors import ConfigError

#: The meaning of the loss of several micro-batches.
LossIs = Literal["whole_batch", "mean_of_micro_batches", "each_micro_batch"]

_WHERE = "the argument micro_batches"


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """The micro-batches of one step, and the loss that they train on together.

    Args:
        count: Number of micro-batches, >= 1. `auto` uses the fewest that fit the memory of the
            ranks, or the number that the planner chooses.
        loss: `whole_batch`, the loss of the undivided batch; `mean_of_micro_batches`, the mean of
            their losses; or `each_micro_batch`, the loss of each, with an update after each
            micro-batch or after every few.
        per_update: With `each_micro_batch`: micro-batches of one update, which trains on the mean
            of their losses. Divides `count`.

    Raises:
        ConfigError: `count` is below 1, is not divisible by `per_update`, `loss` is unknown, or
            `per_update` is given with another `loss` than `each_micro_batch`.
    """

    count: int | Literal["auto"] = 1
    _: KW_ONLY
    loss: LossIs = "whole_batch"
    per_update: int = 1

    def __post_init__(self) -> None:
        if self.count != "auto" and (type(self.count) is not int or self.count < 1):
            raise ConfigError(
                f"micro_batches={self.count!r}",
                where=_WHERE,
                accepted="an integer >= 1, or 'auto': as few as fit the memory, or as many as the "
                "planner chooses",
            )
        if self.loss not in get_args(LossIs):
            raise ConfigError(
                f"loss={self.loss!r} of MicroBatches",
                where=_WHERE,
                accepted=" or ".join(map(repr, get_args(LossIs))),
            )
        several, per_update = self.loss == "each_micro_batch", self.per_update
        fits = type(per_update) is int and per_update >= 1
        if not fits or (several and self.count != "auto" and self.count % per_update):
            raise ConfigError(
                f"per_update={per_update!r} of {self.count} micro-batches",
                where=_WHERE,
                accepted="a divisor of their number",
            )
        if per_update > 1 and not several:
            raise ConfigError(
                f"per_update={per_update} with loss={self.loss!r}, which has one update a step",
                where=_WHERE,
                accepted="1, or loss='each_micro_batch'",
            )

    @classmethod
    def of(cls, given: MicroBatches | int | Literal["auto"]) -> MicroBatches:
        """Return the argument `micro_batches` as `MicroBatches`."""
        return given if isinstance(given, MicroBatches) else cls(given)

    @property
    def is_auto(self) -> bool:
        """Whether their number is chosen with the plan."""
        return self.count == "auto"

    @property
    def known_count(self) -> int:
        """Number of micro-batches; 1 if it is chosen with the plan."""
        return 1 if self.count == "auto" else self.count
