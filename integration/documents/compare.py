"""Compare an output with the lines that a page shows, ignoring figures.

A page may leave out lines anywhere; a line `...` marks this. The output must contain the shown
lines in this order. A figure is a number with its unit; the dims of `S(0)` and the digits of a name
such as `float32` are no figures. Several spaces count as one, and rules may have any length,
because figures determine the widths of columns.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

_RUN = re.compile(r"\d{4}(-\d\d){2}_\d\d(-\d\d){2}")

_RULE = re.compile(r"([─━=-])\1{2,}")

_UNIT = r"(?: ?(?:[kMGTPE]?(?:B|FLOP)|[kMG]i?B|bytes|(?:[mµun]?s|min)(?:/step)?)\b)?"
_NUMBER = re.compile(rf"(?<![\w.])(?<!S\()[-+]?\d[\d,]*(?:\.\d+)*(?:e[-+]?\d+)?%?{_UNIT}(?![\w(])")


def masked(line: str) -> str:
    """Return a line with `#` for its figures and the times that name runs, and single spaces.

    >>> masked("blocks.* x4   (S(0), B)   4.2 MB")
    'blocks.* x4 (S(0), B) #'
    """
    return " ".join(_RULE.sub(r"\1\1\1", _NUMBER.sub("#", _RUN.sub("#", line))).split())


def missing(shown: Sequence[str], output: Sequence[str]) -> tuple[int, str] | None:
    """Return the index of the first shown line that the output lacks, and the most similar line.

    Lines are searched in the order in which they are shown; None if all are there.
    """
    left = [masked(line) for line in output]
    begin = 0
    for index, line in enumerate(shown):
        wanted = masked(line)
        if wanted in ("", "..."):
            continue
        try:
            begin += left[begin:].index(wanted) + 1
        except ValueError:
            return index, _nearest(wanted, left, output)
    return None


def _nearest(wanted: str, lines: Sequence[str], output: Sequence[str]) -> str:
    near = difflib.get_close_matches(wanted, lines, n=1, cutoff=0.3)
    return output[lines.index(near[0])] if near else ""
