"""Drawings of the mesh and the modules on the HTML page of a plan, and the colours of all charts.

Fills are light, so that dark text on them is readable in light and dark mode. The fills of one set
differ in lightness and hue, for readers with a colour vision deficiency. No meaning depends on
colour alone: SBPs are written on their colour, and each set has a legend.

Source: the hues are those of Okabe and Ito, "Color Universal Design", 2008, made paler.

The ranks of each stage are drawn as a mesh, with their nodes. The last axis goes to the right, the
other axes go down.

              tensor 0  tensor 1
    data 0    [ 0 ]     [ 1 ]
    data 1    [ 2 ]     [ 3 ]

The modules are a tree that can be folded, with the SBPs of parameters and outputs. Layers with
equal plans are one branch. The tree is made of nested `details` elements, which need no script; a
row is a CSS grid, so that columns are aligned at any depth.

    blocks.* x4                                                      9.4 MB
      attention                  output (S(0), S(2))                 5.6 MB
        qkv    weight, bias (B, S(0))   output (S(0), S(1))          5.6 MB
               after backward: all-reduce of input gradient ...      4.2 MB
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from types import MappingProxyType

from sbp_core.cluster import Cluster
from sbp_core.memory import MemoryKind
from sbp_core.placement import Placement
from sbp_core.sbp import Broadcast, NdSbp, Split
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.table import Group, groups_of, move_text
from sbp_launch.planning.moves import ranks_text
from sbp_launch.planning.rows import ModuleRow

#: CSS classes by the dim that is split; further dims share the last one.
_SPLITS = ("s0", "s1", "s2", "s3", "s4")

#: Colours of the kinds of memory.
MEMORY: Mapping[MemoryKind, str] = MappingProxyType(
    {
        MemoryKind.PARAMETERS: "#7fb2dd",
        MemoryKind.STATES: "#bcd9ef",
        MemoryKind.BUFFERS: "#8f9aa5",
        MemoryKind.BATCH: "#d3d9de",
        MemoryKind.GATHERED: "#b9a2dd",
        MemoryKind.FETCHED: "#e8b394",
        MemoryKind.GRADIENTS: "#e7b0cb",
        MemoryKind.ACTIVATIONS: "#f3c26b",
        MemoryKind.COMMUNICATION: "#6fbfa5",
        MemoryKind.TEMPORARIES: "#f6e39a",
    }
)

#: Colours of stages.
STAGES = ("#bcd9ef", "#f7d9a4", "#bfe3cf", "#d9caf0", "#f5c6d6", "#dfe5a8", "#c9e7ec", "#e8d3c0")


def chips(text: str, axes: tuple[str, ...]) -> str:
    """Return an nd-SBP as coloured labels, one for each mesh axis, as HTML.

    Args:
        text: `(S(0), B)`, with or without parentheses; or empty, for no labels.
        axes: Names of the axes.
    """
    if not text:
        return ""
    entries = NdSbp.parse(text[1:-1] if text.startswith("(") else text)
    # The CSS class for the SBP of each axis.
    classes = [
        _SPLITS[min(entry.dim, len(_SPLITS) - 1)]
        if isinstance(entry, Split)
        else "b"
        if isinstance(entry, Broadcast)
        else "p"
        for entry in entries
    ]
    made = "".join(
        f'<span class="sbp {style}" title="{escape(axis)}: {escape(str(entry))}">'
        f"{escape(str(entry))}</span>"
        for axis, entry, style in zip(axes, entries, classes, strict=True)
    )
    return f'<span class="chips">{made}</span>'


def legend(entries: Mapping[str, str]) -> str:
    """Return a legend, as HTML: a square of each colour, and its meaning."""
    made = "".join(
        f'<li><span class="swatch" style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in entries.items()
    )
    return f'<ul class="legend">{made}</ul>'


#: With more ranks in a stage, or more stages, these are described and not drawn.
_MOST_RANKS, _MOST_STAGES = 256, 16

_CELL_WIDTH, _CELL_HEIGHT, _GAP = 44, 30, 4

#: Width of a letter of a 12-pixel font, in pixels.
_LETTER = 6.8


def mesh_drawing(stages: Sequence[Placement], cluster: Cluster) -> str:
    """Return the drawings of all stages, as HTML.

    Args:
        stages: Placement of each stage; several may be on the same ranks.
        cluster: The cluster; it determines which ranks share a node.
    """
    parts = []
    for number, stage in enumerate(stages[:_MOST_STAGES]):
        name = f"stage {number}: {ranks_text(stage)}" if len(stages) > 1 else ranks_text(stage)
        colour = STAGES[number % len(STAGES)]
        parts.append(
            f'<figure class="mesh"><figcaption>{escape(name)}</figcaption>'
            f"{_drawing(stage, cluster, colour)}</figure>"
        )
    if (left := len(stages) - _MOST_STAGES) > 0:
        parts.append(f"<p>and {left} stages more</p>")
    return f'<div class="meshes">{"".join(parts)}</div>'


def mesh_text(stages: Sequence[Placement], cluster: Cluster) -> str:
    """Describe the ranks and nodes in a sentence."""
    ranks = {rank for stage in stages for rank in stage.rank_list}
    nodes = len({cluster.node(rank) for rank in ranks})
    where = "one node" if nodes == 1 else f"{nodes} nodes of {cluster.devices_per_node}"
    return f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {where} of cluster {cluster.name!r}"


def _drawing(stage: Placement, cluster: Cluster, colour: str) -> str:
    """Return a stage as SVG; if it is too large, its shape in words."""
    axes = " \N{MULTIPLICATION SIGN} ".join(
        f"{axis} {size}" for axis, size in zip(stage.axes, stage.mesh_shape, strict=True)
    )
    if stage.size > _MOST_RANKS:
        return f"<p>{escape(axes)}, {stage.size} ranks</p>"
    nodes = {cluster.node(rank) for rank in stage.rank_list}
    columns = stage.mesh_shape[-1]
    outer = stage.axes[:-1]
    labels = {}
    cells = []
    margin = 0.0
    for number, (rank, at) in enumerate(stage.coordinates()):
        row, column = divmod(number, columns)
        if outer:
            labels[row] = ", ".join(f"{axis} {n}" for axis, n in zip(outer, at[:-1], strict=True))
            margin = max(margin, _LETTER * len(labels[row]) + 10)
        cells.append((row, column, rank))
    head = 20
    made = []
    for row, text in labels.items():
        y = head + row * (_CELL_HEIGHT + _GAP) + 19
        made.append(f'<text x="{margin - 8:.0f}" y="{y}" text-anchor="end">{escape(text)}</text>')
    for column in range(columns):
        x = margin + column * (_CELL_WIDTH + _GAP) + _CELL_WIDTH / 2
        name = f"{stage.axes[-1]} {column}" if not column else str(column)
        anchor = "middle" if column else "start"
        x = x if column else margin
        made.append(f'<text x="{x:.0f}" y="12" text-anchor="{anchor}">{escape(name)}</text>')
    for row, column, rank in cells:
        x, y = margin + column * (_CELL_WIDTH + _GAP), head + row * (_CELL_HEIGHT + _GAP)
        node = cluster.node(rank)
        told = f"rank {rank}" + (f" on node {node}" if len(nodes) > 1 else "")
        dim = ' fill-opacity="0.55"' if len(nodes) > 1 and node % 2 else ""
        made.append(
            f"<g><title>{told}</title>"
            f'<rect x="{x:.0f}" y="{y}" width="{_CELL_WIDTH}" height="{_CELL_HEIGHT}" rx="4" '
            f'fill="{colour}"{dim}/>'
            f'<text class="on" x="{x + _CELL_WIDTH / 2:.0f}" y="{y + 19}" text-anchor="middle">'
            f"{rank}</text></g>"
        )
    # The label of the first column may be wider than its cells.
    first = _LETTER * len(f"{stage.axes[-1]} 0") + 8
    width = margin + max(columns * (_CELL_WIDTH + _GAP), first)
    height = head + (len(cells) // columns) * (_CELL_HEIGHT + _GAP)
    shades = "<small>paler: every other node</small>" if len(nodes) > 1 else ""
    return (
        f'<svg width="{width:.0f}" height="{height}" role="img" '
        f'aria-label="mesh {escape(axes)}">{"".join(made)}</svg>{shades}'
    )


#: Initially, branches are open down to the first of these depths that shows at most this many rows.
_OPEN_DEPTHS, _MOST_ROWS = (1, 0), 40

#: Name of the model itself.
_ROOT = "(root)"


@dataclass(slots=True)
class _Branch:
    """A module in the tree.

    Args:
        name: Name of the module inside its parent.
        count: Number of layers that it represents.
        row: The plan of the module; None if only its submodules have one.
        inner: Its submodules by name.
    """

    name: str
    count: int = 1
    row: ModuleRow | None = None
    inner: dict[str, _Branch] = field(default_factory=dict)

    @property
    def bytes_of_a_rank(self) -> float:
        """Bytes that a rank sends for the module and its submodules."""
        own = self.row.bytes_of_a_rank if self.row else 0.0
        return own + sum(branch.bytes_of_a_rank for branch in self.inner.values())


def model_tree(rows: Sequence[ModuleRow], stages: Sequence[Placement]) -> str:
    """Return the tree, as HTML."""
    axes = stages[0].axes
    groups = groups_of(rows)  # of all stages, so that layers of one stage are numbered
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
            for one in root.inner.values():
                parts += _branch(one, axes, most, 0, opens)
            continue
        root.name = f"stage {stage} ({ranks_text(stages[stage])})"
        parts += _branch(root, axes, most, 0, opens)
    return f'<div class="tree" id="tree">{"".join(parts)}</div>'


def _tree_of(groups: Sequence[Group], stage: int) -> _Branch:
    """Return an unnamed branch with the modules of one stage."""
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
    """Return the number of visible rows inside a branch."""
    inner = branch.inner.values()
    return len(inner) + (
        sum(_num_rows(one, open_depth - 1) for one in inner) if open_depth >= 0 else 0
    )


def _branch(
    branch: _Branch, axes: tuple[str, ...], most: float, depth: int, opens: int
) -> Iterator[str]:
    """Yield a module: its row, and below it its communication and its submodules.

    Args:
        branch: The module.
        axes: Names of the mesh axes.
        most: Bytes of the stage that sends most; the scale of the bars.
        depth: Depth of the branch.
        opens: Branches down to this depth are open.
    """
    moves = [move for move in branch.row.moves if move.sent_bytes] if branch.row else []
    row = _row(branch, axes, most, depth)
    if not moves and not branch.inner:
        yield f'<div class="row leaf" style="--depth:{depth}">{row}</div>'
        return
    is_open = " open" if branch.inner and depth <= opens else ""
    yield f'<details{is_open}><summary class="row" style="--depth:{depth}">{row}</summary>'
    for move in moves:
        text = move_text(move).replace("\N{NO-BREAK SPACE}", " ")
        text = escape(text.replace("->", "\N{RIGHTWARDS ARROW}"))
        figures = f"{format_bytes(move.bytes_of_a_rank)}, {format_seconds(move.time_s)}"
        yield (
            f'<div class="row move" style="--depth:{depth + 1}"><span class="name">{text}</span>'
            f'<span class="figure">{figures}</span></div>'
        )
    for one in branch.inner.values():
        yield from _branch(one, axes, most, depth + 1, opens)
    yield "</details>"


def _row(branch: _Branch, axes: tuple[str, ...], most: float, depth: int) -> str:
    count = f' <span class="count">&times; {branch.count}</span>' if branch.count > 1 else ""
    cells = ["", ""]
    if branch.row is not None:
        # Parameters with equal SBPs are put together.
        alike: dict[str, list[str]] = {}
        for name, sbp in branch.row.parameters:
            alike.setdefault(sbp, []).append(name)
        stored = (
            f'<span class="stored">{chips(sbp, axes)} <small>{escape(", ".join(names))}</small>'
            "</span>"
            for sbp, names in alike.items()
        )
        cells = ["".join(stored), chips(branch.row.output, axes)]
    size = branch.bytes_of_a_rank
    share = 100 * size / most if most else 0.0
    bar = f'<i style="width:{share:.1f}%"></i>' if size else ""
    sent = f"<b>{format_bytes(size)}</b>{bar}" if size else ""
    return (
        f'<span class="name">{escape(branch.name)}{count}</span>'
        f'<span class="cell">{cells[0]}</span><span class="cell">{cells[1]}</span>'
        f'<span class="figure">{sent}</span>'
    )
