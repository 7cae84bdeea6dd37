"""The table of a plan, as it is printed: equal rows of repeated layers are folded into one.

What does not fit is left out and counted: rows that move most bytes stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sbp_core.graph import Phase
from sbp_core.signatures import is_view
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes
from sbp_launch.rows import Row

#: The number of a layer in the name of a module.
_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")

#: From so many characters on, inputs have a column.
_WIDE = 120
_GAP = 2

_BYTES = "bytes/step"

#: Characters of the columns that are as wide on every line.
_FIXED = {"phase": 6, "outputs": 12, _BYTES: len(_BYTES)}

#: Shares of the other columns in the rest of the line; boxing has what they leave. Explicit, since
#: a column that asks for a least width of its own pushes the last one off the line.
_SHARES = {"module": 0.38, "op": 0.19, "inputs": 0.21}
_NARROW_SHARES = {"module": 0.54, "op": 0.17}

#: How phases are called in a narrow column.
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "update"}

#: Kinds of ops that only move data: their rows are the last to be shown.
_COPIES = ("clone", "cat")


def plan_table(rows: Sequence[Row], max_rows: int, width: int, todo: str = "") -> Table:
    """Return the table that is printed: repeated layers are folded into one row.

    Args:
        rows: As `plan_rows` gives them.
        max_rows: Rows beyond it are left out and counted in the caption: those that move most
            bytes stay, then those of forward and backward.
        width: Characters of a line; below 120 inputs are left out.
        todo: How to see the rows that are left out, for the caption.
    """
    folded = Counter(map(_fold, rows))
    moved: Counter[Row] = Counter()
    for row in rows:
        moved[_fold(row)] += row.moved_bytes
    order = {row: index for index, row in enumerate(folded)}
    kept = sorted(folded, key=lambda row: (_rank(row, moved[row]), order[row]))[:max_rows]
    staged = len({row.stage for row in rows}) > 1
    # Between columns rich puts a space of padding on the right, and one for the box.
    table = Table(
        title="The plan",
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for head, column in _widths(width, staged).items():
        right = head == _BYTES
        table.add_column(
            head,
            overflow="fold",
            width=column,
            justify="right" if right else "left",
            no_wrap=right,
        )
    for row in sorted(kept, key=order.__getitem__):
        module = row.module + (f" x{folded[row]}" if folded[row] > 1 else "")
        phase = _SHORT[row.phase] + (f" {row.stage}" if staged else "")
        inputs = (row.inputs,) if width >= _WIDE else ()
        size = format_bytes(moved[row]) if moved[row] else "-"
        cells = (phase, module, row.kind, *inputs, _short(row.outputs), row.boxing or "-", size)
        table.add_row(*cells)
    hidden = len(folded) - len(kept)
    if hidden:
        kinds = "kinds of rows" if hidden > 1 else "kind of row"
        table.caption = f"{hidden} further {kinds}" + (f": {todo}" if todo else "")
    return table


def _widths(width: int, staged: bool) -> dict[str, int]:
    """Return the characters of each column on a line of `width`."""
    shares = _SHARES if width >= _WIDE else _NARROW_SHARES
    fixed = _FIXED | ({"phase": 8} if staged else {})
    heads = ("phase", "module", "op", "inputs", "outputs", "boxing", _BYTES)
    shown = [head for head in heads if head in fixed or head in shares or head == "boxing"]
    rest = width - sum(fixed.values()) - _GAP * (len(shown) - 1)
    shared = {head: int(rest * share) for head, share in shares.items()}
    widths = fixed | shared | {"boxing": rest - sum(shared.values())}
    return {head: widths[head] for head in shown}


def _short(outputs: str) -> str:
    """Return the SBPs of outputs; of several equal ones, one with their number."""
    parts = re.findall(r"\((?:[^()]|\(\d+\))*\)", outputs)
    same = len(parts) > 1 and len(set(parts)) == 1
    return f"{parts[0]} x{len(parts)}" if same else outputs


def _fold(row: Row) -> Row:
    """Return the row that stands for all equal rows of repeated layers."""
    return replace(row, module=_LAYER.sub("*", row.module), moved_bytes=0)


def _rank(row: Row, moved: int) -> tuple[int, int]:
    """Return what rows are sorted by, where only some can be shown."""
    if moved:
        return 0, -moved
    if row.kind in _COPIES or is_view(f"aten.{row.kind}"):
        return 3, 0
    return (2 if row.phase == Phase.OPTIMIZER.value else 1), 0


def legend(strategy: Strategy) -> str:
    """Return what the words of the table mean, in one line."""
    axes = ", ".join(strategy.stages[0].axes)
    return (
        f"by axis ({axes}): S(d) split along dim d, B whole, P parts of a sum; "
        f"local: nothing is sent"
    )
