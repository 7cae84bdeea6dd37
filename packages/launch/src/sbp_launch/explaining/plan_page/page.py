"""Put the page of a plan together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

from sbp_core.memory import MemoryProfile, call_layouts, lifetimes, memory_profile
from sbp_core.placement import Placement
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.compare import plan_text
from sbp_launch.explaining.figures import Figures, figures_of
from sbp_launch.explaining.plan_page.beside import beside
from sbp_launch.explaining.plan_page.colours import chips
from sbp_launch.explaining.plan_page.memory_chart import memory_chart, memory_legend
from sbp_launch.explaining.plan_page.mesh import mesh_drawing, mesh_text
from sbp_launch.explaining.plan_page.timeline_chart import timeline_chart
from sbp_launch.explaining.plan_page.traffic_chart import traffic_chart
from sbp_launch.explaining.plan_page.tree import model_tree
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.report import arithmetic_lines, period_lines
from sbp_launch.planning.timeline import coarse, plan_timeline
from sbp_launch.planning.utilization import speed_line
from sbp_launch.timelines.style import looks_of

#: Bars, lanes and drawings of memory: more make a page that is large and no clearer.
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
    """Return the page of a plan.

    Args:
        planned: The plan.
        model: What the model is called.
        other: A plan that is put beside it, and what that is called; None for none.
    """
    figures, stages = figures_of(planned), planned.strategy.stages
    cluster = planned.settings.cluster
    parts = {
        "why": ("Why", _why(planned)),
        "mesh": ("Mesh", _mesh(planned)),
        "model": ("Model", _model(planned)),
        "timeline": ("Timeline", _timeline(planned)),
        "memory": ("Memory over time", _memory(planned)),
        "bytes": ("Bytes by collective and link", traffic_chart(figures, cluster)),
    }
    if other is not None:
        name, beside_it = other
        parts["beside"] = ("Beside another plan", beside(planned, beside_it, name))
    ranks = len(planned.plan.ranks)
    here = files("sbp_launch.explaining.plan_page")
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
    """Return the figures on top of the page."""
    step_s = figures.step_s
    together = any(len(part.orders) > 1 for part in planned.plan.ranks)
    tiles = [
        (
            "predicted step",
            format_seconds(step_s),
            _share_bar(figures, together=together) + _speed(planned, step_s),
        ),
        (
            "a rank sends in a step",
            format_bytes(figures.sent_bytes / figures.num_ranks),
            f"in {sum(one.num_calls for one in figures.traffic)} collectives and transfers",
        ),
    ]
    if figures.fullest is not None:
        share = figures.fullest.peak / figures.limit_bytes
        tiles.append(
            (
                "memory of the fullest rank",
                format_bytes(figures.fullest.peak),
                f"{100 * share:.3g}% of {format_bytes(figures.limit_bytes)}, on rank "
                f"{figures.fullest.rank}",
            )
        )
    tiles += _bound_tiles(planned.strategy.report)
    made = "".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="note">'
        f"{note if note.startswith('<') else escape(note)}</dd></div>"
        for name, value, note in tiles
    )
    return f'<dl class="tiles">{made}</dl>'


def _speed(planned: Planned, step_s: float) -> str:
    """Return samples a second and MFU, as a line of their own."""
    cluster, num_ranks = planned.settings.cluster, len(planned.plan.ranks)
    told = speed_line(planned.graph, cluster, num_ranks, step_s) if step_s else ""
    return f'<span class="speed">{escape(told.partition(" (")[0])}</span>' if told else ""


def _share_bar(figures: Figures, *, together: bool) -> str:
    """Return which shares of the step a rank computes, boxes and waits, as a bar and in words.

    Args:
        figures: Of the plan.
        together: Whether ranks box on a thread of its own, so that the shares are no parts.
    """
    step_s = figures.step_s
    if not step_s:
        return ""
    computing, boxing = figures.computing_s / step_s, figures.boxing_s / step_s
    parts = {looks_of(["F"])["F"].fill: computing, "#f2994a": 0.0 if together else boxing}
    bar = "".join(
        f'<i style="width:{100 * share:.2f}%;background:{colour}"></i>'
        for colour, share in parts.items()
    )
    told = f"{100 * computing:.0f}% computing, {100 * boxing:.0f}% boxing"
    if together:
        told += " at the same time"
    else:
        told += f", {100 * max(0.0, 1 - computing - boxing):.0f}% waiting"
    return f'<span class="shares">{bar}</span>{escape(told)}: the mean of all ranks'


def _bound_tiles(report: Mapping[str, object]) -> Iterator[tuple[str, str, str]]:
    """Yield how far the plan may be from the best, if its planner says so."""
    bound_s, gap = report.get("bound_s"), report.get("gap")
    if isinstance(bound_s, int | float):
        yield (
            "no plan takes less than",
            format_seconds(bound_s),
            "without overlap: the planner's bound",
        )
    if isinstance(gap, int | float):
        yield "gap to the bound", f"{100 * gap:.2g}%", "so much faster a plan may be, at most"


def _why(planned: Planned) -> str:
    """Return what the planner says, and what keeps steps from following each other faster."""
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


def _mesh(planned: Planned) -> str:
    stages = planned.strategy.stages
    return mesh_drawing(stages, planned.settings.cluster)


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
        "training step, in all layers of a row; the time behind boxing is what it takes alone."
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
    """Return the memory of the fullest rank of each set of ranks that hold the same stages."""
    if isinstance(planned.memory, str):
        return f"<p>Memory is not known: {escape(planned.memory)}</p>"
    found = lifetimes(planned.plan, call_layouts())
    sets = _rank_sets(planned.strategy.stages)
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


def _rank_sets(stages: Sequence[Placement]) -> dict[tuple[int, ...], list[int]]:
    """Return the stages that lie on each set of ranks."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(stages):
        sets.setdefault(stage.rank_list, []).append(number)
    return sets
