"""Format and parse numbers with units for people; inside, everything is in SI base units."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = [
    "format_bytes",
    "format_count",
    "format_flop",
    "format_ranges",
    "format_seconds",
    "parse_bytes",
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)(i?)B")


def format_bytes(size_bytes: float) -> str:
    """Return a size in decimal units: `172.1 MB`; exact below 10,000 bytes."""
    if size_bytes < 10_000:
        return f"{size_bytes:.0f} B"
    size, unit = size_bytes / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if size < 999.95:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}"


def format_count(number: int, word: str, plural: str = "s") -> str:
    """Return a number with its word.

    >>> format_count(1, "step"), format_count(3, "batch", "es")
    ('1 step', '3 batches')
    """
    return f"{number} {word}{plural * (number != 1)}"


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a text with a unit: `90MB`, `1.5 GiB`; None if there is no unit.

    >>> parse_bytes("90 MB"), parse_bytes("4GiB"), parse_bytes("4")
    (90000000, 4294967296, None)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        return None
    factor: int = (1024 if found[3] else 1000) ** " KMGTP".index(found[2].upper() or " ")
    return round(float(found[1]) * factor)


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits: `1.25 s`, `17.3 ms`, `42 µs`."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def format_flop(work_flop: float) -> str:
    """Return work in floating-point operations with a decimal prefix, such as `17.2 GFLOP`."""
    prefixes = ("", "k", "M", "G", "T", "P")
    power = 0
    while power + 1 < len(prefixes) and work_flop >= 1000 ** (power + 1):
        power += 1
    return f"{work_flop / 1000**power:.3g} {prefixes[power]}FLOP"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return distinct whole numbers, in order, as text: `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
