"""Write a plan as one HTML page without external files (`sbp-plan page=FILE`).

    summary     time, bytes, memory, reasons
    mesh        ranks, stages, nodes
    model       a tree of modules, with the SBP of parameters and outputs by mesh axis
    timeline    the simulated step
    memory      over that step, by kind, of the fullest rank of each stage
    traffic     bytes by collective and link
    comparison  another plan, if one is compared

`page_model` and `page_charts` make the drawings; this module makes the tables and the page. The
page is readable without its script (`page.js`), which folds, filters and zooms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

from sbp_core.cluster import Cluster
from sbp_core.memory import MemoryProfile, call_layouts, lifetimes, memory_profile
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.compare import changed_rows, figure_rows, plan_text
from sbp_launch.explaining.page_charts import memory_chart, memory_legend, timeline_chart
from sbp_launch.explaining.page_model import chips, mesh_drawing, mesh_text, model_tree
from sbp_launch.explaining.plan_figures import Figures, figures_of
from sbp_launch.explaining.plan_timeline import coarse, plan_timeline
from sbp_launch.explaining.report import arithmetic_lines, period_lines
from sbp_launch.explaining.timelines import looks_of
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.utilization import num_parameters, speed_line

__all__ = ["plan_page"]

#: Most bars, lanes and memory charts: more would make the page large, but not clearer.
_MOST_BARS, _MOST_LANES, _MOST_CHARTS = 6_000, 64, 16

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
$style
</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="lead">$lead</p>
<nav aria-label="parts of the page">$links</nav>
$tiles
</header>
<main>
$sections
</main>
<script>
$script
</script>
</body>
</html>
""")

_TOOLS = (
    '<div class="tools"><button type="button" id="open">open all</button>'
    '<button type="button" id="close">close all</button>'
    '<label><span hidden>modules</span><input type="search" id="filter" '
    'placeholder="find modules or boxing" aria-label="find modules or boxing"></label>'
    '<span id="nothing" role="status" hidden>nothing of that name</span></div>'
)

_ZOOM = (
    '<div class="tools"><label>enlarge <input type="range" id="zoom" min="0" max="6" step="0.25" '
    'value="0"></label></div>'
)


def plan_page(planned: Planned, model: str, other: tuple[str, Planned] | None = None) -> str:
    """Return the page of a plan, as HTML."""
    figures, stages = figures_of(planned), planned.strategy.stages
    cluster = planned.settings.cluster
    parts = {
        "why": ("Why", _why(planned)),
        "mesh": ("Mesh", mesh_drawing(stages, cluster)),
        "model": ("Model", _model(planned)),
        "timeline": ("Timeline", _timeline(planned)),
        "memory": ("Memory over time", _memory(planned)),
        "bytes": ("Bytes by collective and link", traffic_chart(figures, cluster)),
    }
    if other is not None:
        name, compared = other
        parts["comparison"] = ("Next to another plan", comparison(planned, compared, name))
    ranks = len(planned.plan.ranks)
    here = files("sbp_launch.explaining")
    return _PAGE.substitute(
        title=f"{escape(model)} on {ranks} rank{'s' * (ranks > 1)}",
        lead=escape(f"{plan_text(planned.strategy)}; {mesh_text(stages, cluster)}"),
        links="".join(f'<a href="#{key}">{name}</a>' for key, (name, _) in parts.items()),
        tiles=_tiles(planned, figures),
        sections="\n".join(
            f'<section id="{key}"><h2>{name}</h2>\n{text}\n</section>'
            for key, (name, text) in parts.items()
        ),
        style=here.joinpath("page.css").read_text("utf-8"),
        script=here.joinpath("page.js").read_text("utf-8"),
    )


def _tiles(planned: Planned, figures: Figures) -> str:
    """Return the main figures, for the top of the page."""
    step_s, cluster, num_ranks = figures.step_s, planned.settings.cluster, len(planned.plan.ranks)
    # If boxing has its own thread, both overlap, and the fractions do not add up.
    together = any(len(part.orders) > 1 for part in planned.plan.ranks)
    shares = ""
    if step_s:
        computing, boxing = figures.computing_s / step_s, figures.boxing_s / step_s
        parts = {looks_of(["F"])["F"].fill: computing, "#f2994a": 0.0 if together else boxing}
        bar = "".join(
            f'<i style="width:{100 * share:.2f}%;background:{colour}"></i>'
            for colour, share in parts.items()
        )
        told = f"{100 * computing:.0f}% computing, {100 * boxing:.0f}% boxing"
        waiting = f", {100 * max(0.0, 1 - computing - boxing):.0f}% waiting"
        told += " at the same time" if together else waiting
        shares = f'<span class="shares">{bar}</span>{escape(told)}: the mean of all ranks'
        if speed := speed_line(planned.graph, cluster, num_ranks, step_s):
            shares += f'<span class="speed">{escape(speed.partition(" (")[0])}</span>'
    calls = sum(one.num_calls for one in figures.traffic)
    sent = format_bytes(figures.sent_bytes / figures.num_ranks)
    tiles = [
        ("predicted step", format_seconds(step_s), shares),
        ("parameters of the model", f"{num_parameters(planned.graph):,}", "over all ranks"),
        ("a rank sends in a step", sent, f"in {calls} collectives and transfers"),
    ]
    if (fullest := figures.fullest) is not None:
        share = f"{100 * fullest.peak / figures.limit_bytes:.3g}%"
        note = f"{share} of {format_bytes(figures.limit_bytes)}, on rank {fullest.rank}"
        tiles.append(("memory of the fullest rank", format_bytes(fullest.peak), note))
    bound_s, gap = (planned.strategy.report.get(name) for name in ("bound_s", "gap"))
    if isinstance(bound_s, int | float):
        note = "without overlap: the planner's bound"
        tiles.append(("no plan takes less than", format_seconds(bound_s), note))
    if isinstance(gap, int | float):
        note = "a plan can be at most this much faster"
        tiles.append(("gap to the bound", f"{100 * gap:.2g}%", note))
    made = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="note">'
        f"{note if note.startswith('<') else escape(note)}</dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{made}</dl>'


def _why(planned: Planned) -> str:
    """Return the planner's explanation, and what limits the period of steps."""
    graph, strategy = planned.graph, planned.strategy
    explanation = strategy.report.get("explanation", ())
    lines = [str(line) for line in explanation] if isinstance(explanation, list | tuple) else []
    lines += arithmetic_lines(graph, strategy)
    optimal = strategy.report.get("optimal_by_axis")
    if isinstance(optimal, Mapping):
        for axis, proved in optimal.items():
            lines.append(
                f"mesh axis {axis}: the choice is "
                + ("proved" if proved else "not proved")
                + " to be the cheapest, given the axes before it"
            )
    period, *cycle = period_lines(planned.checked)
    waits = "".join(f"<li>{escape(line.strip())}</li>" for line in cycle)
    said = "".join(
        f"<li{' class=inner' * line.startswith(' ')}>{escape(line.strip())}</li>" for line in lines
    )
    return (
        f'<div class="why"><ul>{said}</ul><details><summary>{escape(period)}</summary>'
        f"<ul>{waits}</ul></details></div>"
    )


def _model(planned: Planned) -> str:
    axes = planned.strategy.stages[0].axes
    meaning = {
        "B": "whole on each rank",
        "S(0)": "split along dim 0",
        "S(1)": "along dim 1",
        "S(2)": "along dim 2",
        "S(3)": "along dim 3, and so on",
        "P": "parts of a sum",
    }
    told = "".join(
        f"<li>{chips(entry, ('SBP',))} {escape(text)}</li>" for entry, text in meaning.items()
    )
    order = " and ".join(axes) if len(axes) < 3 else ", ".join(axes)
    each = f"one chip for each mesh axis: {order}" if len(axes) > 1 else f"mesh axis {order}"
    return (
        f'<ul class="legend">{told}</ul><p><small>{escape(each)}. What a rank sends is in a '
        "training step, in all layers of a row; the time of boxing is what it takes alone."
        f"</small></p>{_TOOLS}{model_tree(planned.module_rows, planned.strategy.stages)}"
    )


def _timeline(planned: Planned) -> str:
    drawn, said = coarse(
        plan_timeline(planned.plan, planned.simulation, "a step, simulated"),
        _MOST_BARS,
        _MOST_LANES,
    )
    notes = f"<p><small>{escape('; '.join(said))}</small></p>" if said else ""
    return f"{_ZOOM}{timeline_chart(drawn)}{notes}"


def _memory(planned: Planned) -> str:
    """Return the memory chart of the fullest rank of each set of ranks with the same stages."""
    if isinstance(planned.memory, str):
        return f"<p>Memory is not known: {escape(planned.memory)}</p>"
    found = lifetimes(planned.plan, call_layouts())
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(planned.strategy.stages):
        sets.setdefault(stage.rank_list, []).append(number)
    profiles: list[tuple[str, MemoryProfile]] = []
    for ranks, held in list(sets.items())[:_MOST_CHARTS]:
        memory = planned.memory.ranks
        fullest = max(ranks, key=lambda rank: memory[rank].peak)
        of = (
            f" of stage{'s' * (len(held) > 1)} {', '.join(map(str, held))}" if len(sets) > 1 else ""
        )
        others = f", the fullest of {len(ranks)}" if len(ranks) > 1 else ""
        profiles.append((f"rank {fullest}{of}{others}", memory_profile(found[fullest])))
    limit_bytes = planned.settings.cluster.device.memory_bytes
    charts = "".join(
        memory_chart(profile, planned.simulation, limit_bytes, name) for name, profile in profiles
    )
    left = len(sets) - len(profiles)
    more = f"<p><small>and {left} sets of ranks more</small></p>" if left else ""
    return memory_legend([profile for _, profile in profiles]) + charts + more


#: Colours of levels of links, innermost first; further levels have the last colour.
_LEVEL_COLOURS = ("#a9cfee", "#f3b46b", "#e07b6a", "#a569bd")


def traffic_chart(figures: Figures, cluster: Cluster) -> str:
    """Return a table of the bytes that a rank sends, by collective and level of links."""
    if not figures.traffic:
        return "<p>Nothing is sent between ranks.</p>"
    most = max(one.sent_bytes for one in figures.traffic)
    rows = []
    for one in sorted(figures.traffic, key=lambda one: -one.sent_bytes):
        level = cluster.levels[one.level]
        colour = _LEVEL_COLOURS[min(one.level, len(_LEVEL_COLOURS) - 1)]
        bar = f'<i style="width:{100 * one.sent_bytes / most:.1f}%;background:{colour}"></i>'
        sent, time = format_bytes(one.sent_bytes / figures.num_ranks), format_seconds(one.time_s)
        told = (f"{level.name} of {level.num_ranks}", f".bar {bar}")
        rows.append([one.kind.value, *told, *_figures(sent, one.num_calls, time)])
    total = format_bytes(sum(one.sent_bytes for one in figures.traffic) / figures.num_ranks)
    time = format_seconds(sum(one.time_s for one in figures.traffic))
    calls = sum(one.num_calls for one in figures.traffic)
    rows.append([".total all", "", ".bar ", *_figures(total, calls, time)])
    heads = ("collective", "within a", "", *_figures("a rank sends", "calls", "time"))
    return _table(heads, rows)


def _figures(*texts: object) -> Iterator[str]:
    return (f".figure {text}" for text in texts)


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML; the first cell of a row is its head, indented if its text is.

    `.figure TEXT` and `.bar HTML` are cells of these classes, and `.total TEXT` is the head of a
    row of that class.
    """

    def cell(tag: str, text: str, also: str = "") -> str:
        style, _, inner = text.partition(" ") if text.startswith(".") else ("", "", text)
        named = f' class="{style[1:]}"' if style in (".figure", ".bar") else ""
        return f"<{tag}{also}{named}>{inner if style == '.bar' else escape(inner)}</{tag}>"

    made = []
    for head, *cells in rows:
        name = head.removeprefix(".total ")
        indent = ' style="padding-left:1.2rem"' * name.startswith(" ")
        total = ' class="total"' * (name != head)
        first = cell("th", name.strip(), f' scope="row"{indent}')
        made.append(f"<tr{total}>{first}{''.join(cell('td', one) for one in cells)}</tr>")
    return (
        f'<table class="traffic"><thead><tr>{"".join(cell("th", one) for one in heads)}</tr>'
        f"</thead><tbody>{''.join(made)}</tbody></table>"
    )


def comparison(this: Planned, other: Planned, name: str) -> str:
    """Return the comparison of the plan with another plan of the same model, as HTML."""
    said, *changed = changed_rows(this, other, name)
    figures = _table(
        ("", *_figures("this plan", name, "change")),
        ([head, *_figures(*cells)] for head, *cells in figure_rows(this, other)),
    )
    modules = _table(
        ("module", "what", f"this plan \u2192 {name}"),
        ([head, what, _arrow(text)] for head, what, text in changed),
    )
    return (
        f"<p>{escape(name)}: {escape(plan_text(other.strategy))}</p>{figures}"
        f"<p>{escape(_arrow(said[0]))}</p>{modules if changed else ''}"
    )


def _arrow(text: str) -> str:
    return text.replace("->", "\N{RIGHTWARDS ARROW}")
