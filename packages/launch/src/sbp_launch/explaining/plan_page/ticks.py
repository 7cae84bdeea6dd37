"""Round numbers along an axis of a drawing."""

from __future__ import annotations

from math import floor, log10


def round_ticks(end: float, most: int) -> list[float]:
    """Return 0 and further round numbers below `end`, at equal distances.

    Args:
        end: Of the axis, >= 0.
        most: The most numbers beside 0, >= 2.
    """
    if end <= 0:
        return [0.0]
    power = 10.0 ** floor(log10(end / most))
    step = next(power * one for one in (1, 2, 5, 10) if power * one * most >= end * (1 - 1e-9))
    # The text of one at the very end would stand beyond the drawing.
    return [step * number for number in range(floor(0.95 * end / step + 1e-9) + 1)]
