"""Bytes of a step by collective and by link, as bars in a table."""

from __future__ import annotations

from html import escape

from sbp_core.cluster import Cluster
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.figures import Figures

#: Of levels of links, innermost first; further ones have the last.
_LEVEL_COLOURS = ("#a9cfee", "#f3b46b", "#e07b6a", "#a569bd")


def traffic_chart(figures: Figures, cluster: Cluster) -> str:
    """Return a table of what a rank sends, by collective and level of links."""
    if not figures.traffic:
        return "<p>Nothing is sent between ranks.</p>"
    most = max(one.sent_bytes for one in figures.traffic)
    rows = []
    for one in sorted(figures.traffic, key=lambda one: -one.sent_bytes):
        level = cluster.levels[one.level]
        colour = _LEVEL_COLOURS[min(one.level, len(_LEVEL_COLOURS) - 1)]
        rows.append(
            f'<tr><th scope="row">{escape(one.kind.value)}</th>'
            f"<td>{escape(level.name)} of {level.num_ranks}</td>"
            f'<td class="bar"><i style="width:{100 * one.sent_bytes / most:.1f}%;'
            f'background:{colour}"></i></td>'
            f'<td class="figure">{format_bytes(one.sent_bytes / figures.num_ranks)}</td>'
            f'<td class="figure">{one.num_calls}</td>'
            f'<td class="figure">{format_seconds(one.time_s)}</td></tr>'
        )
    total = sum(one.sent_bytes for one in figures.traffic) / figures.num_ranks
    calls = sum(one.num_calls for one in figures.traffic)
    time_s = sum(one.time_s for one in figures.traffic)
    rows.append(
        '<tr class="total"><th scope="row">all</th><td></td><td class="bar"></td>'
        f'<td class="figure">{format_bytes(total)}</td><td class="figure">{calls}</td>'
        f'<td class="figure">{format_seconds(time_s)}</td></tr>'
    )
    return (
        '<table class="traffic"><thead><tr><th>collective</th><th>within a</th><th></th>'
        '<th class="figure">a rank sends</th><th class="figure">calls</th>'
        f'<th class="figure">time</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )
