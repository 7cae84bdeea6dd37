"""The ranks of a plan, drawn as the mesh that they are: by stage, with their nodes.

              tensor 0  tensor 1
    data 0    [ 0 ]     [ 1 ]
    data 1    [ 2 ]     [ 3 ]

The last axis goes to the right; the others go down.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sbp_core.cluster import Cluster
from sbp_core.placement import Placement
from sbp_launch.explaining.plan_page.colours import STAGES
from sbp_launch.planning.moves import ranks_text

#: More ranks of a stage, or stages, than these are told of and not drawn.
_MOST_RANKS, _MOST_STAGES = 256, 16

_CELL_WIDTH, _CELL_HEIGHT, _GAP = 44, 30, 4

#: Width of a letter of 12 pixels, in pixels.
_LETTER = 6.8


def mesh_drawing(stages: Sequence[Placement], cluster: Cluster) -> str:
    """Return the drawings of all stages.

    Args:
        stages: Placement of each; several may lie on the same ranks.
        cluster: Says which ranks share a node.
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
    """Return the machine in a sentence."""
    ranks = {rank for stage in stages for rank in stage.rank_list}
    nodes = len({cluster.node(rank) for rank in ranks})
    where = "one node" if nodes == 1 else f"{nodes} nodes of {cluster.devices_per_node}"
    return f"{len(ranks)} rank{'s' * (len(ranks) > 1)} on {where} of cluster {cluster.name!r}"


def _drawing(stage: Placement, cluster: Cluster, colour: str) -> str:
    """Return a stage as SVG, or its shape in words if it is large."""
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
    # The label of the first column may be wider than the cells.
    first = _LETTER * len(f"{stage.axes[-1]} 0") + 8
    width = margin + max(columns * (_CELL_WIDTH + _GAP), first)
    height = head + (len(cells) // columns) * (_CELL_HEIGHT + _GAP)
    shades = "<small>paler: every other node</small>" if len(nodes) > 1 else ""
    return (
        f'<svg width="{width:.0f}" height="{height}" role="img" '
        f'aria-label="mesh {escape(axes)}">{"".join(made)}</svg>{shades}'
    )
