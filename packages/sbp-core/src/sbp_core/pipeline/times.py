"""How long actions take, in whole numbers of a small enough unit, so that no sum is rounded.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, lcm

from sbp_core.errors import ConfigError

Duration = int | float | Fraction
"""A time that somebody gives; a float stands for the exact number that it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What the work of one rank on one micro-batch takes, all of its chunks together.

    Args:
        forward: F, above 0.
        input_gradient: I, at least 0.
        weight_gradient: W, at least 0. The whole backward takes I + W.
    """

    forward: Fraction
    input_gradient: Fraction
    weight_gradient: Fraction

    @property
    def work(self) -> Fraction:
        """F + I + W."""
        return self.forward + self.input_gradient + self.weight_gradient


def stage_times(times: Sequence[object], num_ranks: int) -> tuple[StageTimes, ...]:
    """Return the times of each rank.

    Args:
        times: `[F, I, W]` of all ranks alike, or one such list for each rank.
        num_ranks: Ranks of the pipeline.

    Raises:
        ConfigError: There are not three times, or not one list for each rank; a time is negative,
            a forward takes none, or it is no number.
    """
    nested = bool(times) and all(isinstance(one, Sequence) for one in times)
    rows = list(times) if nested else [times] * num_ranks
    if len(rows) != num_ranks:
        raise ConfigError(
            f"times of {len(rows)} stages for a pipeline of {num_ranks} ranks",
            accepted="[F, I, W] for all ranks, or one such list for each rank",
            todo=f"write {num_ranks} lists, or one",
        )
    return tuple(_one_rank(row, rank if nested else None) for rank, row in enumerate(rows))


def _one_rank(row: object, rank: int | None) -> StageTimes:
    where = "times" if rank is None else f"times of rank {rank}"
    accepted = "three times: forward, input gradient, weight gradient, such as [1, 1.25, 0.75]"
    if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
        raise ConfigError(
            f"{row!r} is not what a rank's forward and backward take",
            where=where,
            accepted=accepted,
            todo="write F, I and W; where the backward is not split, its time is I + W",
        )
    forward, input_gradient, weight_gradient = (duration(one, where) for one in row)
    if not forward or not input_gradient + weight_gradient:
        raise ConfigError(
            f"a forward or a backward of {[float(one) for one in (forward, input_gradient)]} takes "
            "no time",
            where=where,
            accepted="F > 0 and I + W > 0",
        )
    return StageTimes(
        forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
    )


def duration(value: object, where: str) -> Fraction:
    """Return a time of at least 0 as an exact number.

    Raises:
        ConfigError: It is no number, negative, or infinite.
    """
    if isinstance(value, bool) or not isinstance(value, Duration) or not 0 <= value < inf:
        raise ConfigError(
            f"{value!r} is no time",
            where=where,
            accepted="numbers of at least 0, such as 1, 0.75 or 2e-3",
        )
    return Fraction(value)


def common_unit(numbers: Sequence[Fraction]) -> Fraction:
    """Return a unit of which all the numbers are whole multiples."""
    return Fraction(1, lcm(*(number.denominator for number in numbers)))
