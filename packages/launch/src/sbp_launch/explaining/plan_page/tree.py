"""The modules of a plan as a tree that opens and closes, with the SBP of what they hold and make.

    blocks.* x4                                                      9.4 MB
      attention                  output (S(0), S(2))                 5.6 MB
        qkv    weight, bias (B, S(0))   output (S(0), S(1))          5.6 MB
               after backward: all-reduce of input gradient ...      4.2 MB

Layers that are planned alike are one branch. The tree is nested `details`, which browsers open
without a script; a row is a grid, so that columns stay in line at any depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from sbp_core.placement import Placement
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.plan_page.colours import chips
from sbp_launch.planning.moves import ranks_text
from sbp_launch.planning.rows import ModuleMove, ModuleRow
from sbp_launch.planning.table import Group, groups_of, move_text

#: Branches are open at first down to the depth, of these, that shows no more rows than this.
_OPEN_DEPTHS, _MOST_ROWS = (1, 0), 40

#: What the model itself is called.
_ROOT = "(root)"


@dataclass(slots=True)
class _Branch:
    """A module in the tree.

    Args:
        name: Of the module in the one above.
        count: Layers that it stands for.
        row: What is said of it; None of a module whose submodules alone do something.
        inner: Its submodules by name.
    """

    name: str
    count: int = 1
    row: ModuleRow | None = None
    inner: dict[str, _Branch] = field(default_factory=dict)

    @property
    def bytes_of_a_rank(self) -> float:
        """What a rank sends for it and all that is in it."""
        own = self.row.bytes_of_a_rank if self.row else 0.0
        return own + sum(branch.bytes_of_a_rank for branch in self.inner.values())


def model_tree(rows: Sequence[ModuleRow], stages: Sequence[Placement]) -> str:
    """Return the tree.

    Args:
        rows: A row for each module and stage.
        stages: Placement of each stage.
    """
    axes = stages[0].axes
    groups = groups_of(rows)  # of all stages, so that layers of one are told by their numbers
    roots = [_tree_of(groups, stage) for stage in range(len(stages))]
    most = max((root.bytes_of_a_rank for root in roots), default=0.0)
    shown = {depth: sum(_num_rows(root, depth) for root in roots) for depth in _OPEN_DEPTHS}
    opens = next((depth for depth in _OPEN_DEPTHS if shown[depth] <= _MOST_ROWS), -1)
    by = escape(", ".join(axes))
    parts = [
        '<div class="row head" aria-hidden="true"><span class="name">module</span>'
        f"<span>parameters, over {by}</span><span>output, over {by}</span>"
        '<span class="figure">a rank sends</span></div>'
    ]
    for stage, root in enumerate(roots):
        if len(stages) == 1:
            parts += _inner(root, axes, most, 0, opens)
            continue
        root.name = f"stage {stage} ({ranks_text(stages[stage])})"
        parts += _branch(root, axes, most, 0, opens)
    return f'<div class="tree" id="tree">{"".join(parts)}</div>'


def _tree_of(groups: Sequence[Group], stage: int) -> _Branch:
    """Return the modules of one stage below a branch of no module."""
    top = _Branch("")
    for group in (group for group in groups if group.stage == stage):
        for row in group.rows:
            at = top
            if group.name:
                name = group.name.partition(" ")[0]
                at = at.inner.setdefault(name, _Branch(name, group.count))
            names = row.module.split(".") if row.module else []
            for name in names if group.name or names else [_ROOT]:
                at = at.inner.setdefault(name, _Branch(name))
            at.row = row
    return top


def _num_rows(branch: _Branch, open_depth: int) -> int:
    """Return how many rows are seen of what is in a branch."""
    inner = branch.inner.values()
    return len(inner) + (
        sum(_num_rows(one, open_depth - 1) for one in inner) if open_depth >= 0 else 0
    )


def _inner(
    branch: _Branch, axes: tuple[str, ...], most: float, depth: int, opens: int
) -> Iterator[str]:
    for one in branch.inner.values():
        yield from _branch(one, axes, most, depth, opens)


def _branch(
    branch: _Branch, axes: tuple[str, ...], most: float, depth: int, opens: int
) -> Iterator[str]:
    """Yield a module: its row, and below it what travels around it, and its submodules.

    Args:
        branch: The module.
        axes: Of the mesh.
        most: What the stage that sends most sends, in bytes.
        depth: Of the branch.
        opens: Branches down to this depth are open.
    """
    moves = [move for move in branch.row.moves if move.sent_bytes] if branch.row else []
    row = _row(branch, axes, most, depth)
    if not moves and not branch.inner:
        yield f'<div class="row leaf" style="--depth:{depth}">{row}</div>'
        return
    is_open = " open" if branch.inner and depth <= opens else ""
    yield f'<details{is_open}><summary class="row" style="--depth:{depth}">{row}</summary>'
    yield from (_move(move, depth + 1) for move in moves)
    yield from _inner(branch, axes, most, depth + 1, opens)
    yield "</details>"


def _row(branch: _Branch, axes: tuple[str, ...], most: float, depth: int) -> str:
    count = f' <span class="count">&times; {branch.count}</span>' if branch.count > 1 else ""
    cells = ["", ""]
    if branch.row is not None:
        cells = [_parameters(branch.row, axes), chips(branch.row.output, axes)]
    size = branch.bytes_of_a_rank
    share = 100 * size / most if most else 0.0
    bar = f'<i style="width:{share:.1f}%"></i>' if size else ""
    sent = f"<b>{format_bytes(size)}</b>{bar}" if size else ""
    return (
        f'<span class="name">{escape(branch.name)}{count}</span>'
        f'<span class="cell">{cells[0]}</span><span class="cell">{cells[1]}</span>'
        f'<span class="figure">{sent}</span>'
    )


def _parameters(row: ModuleRow, axes: tuple[str, ...]) -> str:
    """Return how the parameters of a module are stored; those that are stored alike together."""
    found: dict[str, list[str]] = {}
    for name, sbp in row.parameters:
        found.setdefault(sbp, []).append(name)
    return "".join(
        f'<span class="stored">{chips(sbp, axes)} <small>{escape(", ".join(names))}</small></span>'
        for sbp, names in found.items()
    )


def _move(move: ModuleMove, depth: int) -> str:
    text = move_text(move).replace("\N{NO-BREAK SPACE}", " ").replace("->", "\N{RIGHTWARDS ARROW}")
    return (
        f'<div class="row move" style="--depth:{depth}"><span class="name">{escape(text)}</span>'
        f'<span class="figure">{format_bytes(move.bytes_of_a_rank)}, '
        f"{format_seconds(move.time_s)}</span></div>"
    )
