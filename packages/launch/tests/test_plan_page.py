"""A plan as one page: whole in itself, well formed, and true to the plan."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rows import found_plan
from trainable import row

from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError
from sbp_core.memory import MemoryKind, MemoryReport, call_layouts, lifetimes, memory_profile
from sbp_core.placement import Placement
from sbp_core.timeline import Bar, Lane, Timeline
from sbp_launch.apps.answers import draw_page
from sbp_launch.apps.plan import PlanConfig
from sbp_launch.explaining.compare import figure_rows
from sbp_launch.explaining.page_charts import (
    memory_chart,
    peaks_of,
    round_ticks,
    tick_times_s,
    timeline_chart,
)
from sbp_launch.explaining.page_model import MEMORY, STAGES, chips, mesh_drawing, model_tree
from sbp_launch.explaining.plan_page import plan_page
from sbp_launch.explaining.table import groups_of
from sbp_launch.explaining.timelines import looks_of

#: Elements without an end.
_EMPTY = {"meta", "link", "input"}
PAGES = ("replicated", "sharded", "pipeline of meshes")


class _Page(HTMLParser):
    """Reads a page: whether every element ends, what it refers to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _EMPTY:
            self.open.append(tag)
        found = dict(attrs)
        self.references += [found[key] or "" for key in ("href", "src") if key in found]
        self.ids += [found["id"] or ""] if "id" in found else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        return  # such as <line .../>

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@cache
def page_of(name: str) -> str:
    return plan_page(found_plan(name), "wide <model>")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed_and_refers_to_nothing_but_itself(name: str) -> None:
    page = _Page(page_of(name))

    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    for reference in page.references:
        assert reference == "data:," or reference.removeprefix("#") in page.ids
    assert not re.search(r"url\(|@import|fetch\(|https?://", page_of(name))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_every_module_and_escapes_what_it_is_given(name: str) -> None:
    planned = found_plan(name)

    words = " ".join(_Page(page_of(name)).words)

    for module in {one.module for one in planned.module_rows if one.module}:
        assert module.rpartition(".")[2] in words
    assert "wide <model> on" in words and "<model>" not in page_of(name)


def test_bound_and_gap_are_shown_where_a_planner_says_them() -> None:
    planned = found_plan("replicated")
    report = {**planned.strategy.report, "bound_s": 0.25, "gap": 0.015}
    with_bound = replace(planned, strategy=replace(planned.strategy, report=report))

    assert "gap to the bound" not in page_of("replicated")
    page = plan_page(with_bound, "wide")
    assert "250 ms" in page and "1.5%" in page


def test_the_tree_opens_layers_that_are_alike_once_and_adds_up_what_they_send() -> None:
    stages = (Placement([0, 1], ("data",)),)
    rows = [row(f"blocks.{n}.{name}", moved=1000) for n in range(96) for name in ("up", "down")]

    tree = model_tree(rows, stages)

    assert tree.count(">up<") == 1
    assert "&times; 96" in tree
    assert "192.0 kB" in tree and "96.0 kB" in tree


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["replicated", "sharded", "pipeline", "micro-batches"])
def test_memory_over_time_has_the_exact_peak_within_the_step(name: str) -> None:
    planned = found_plan(name)
    assert isinstance(planned.memory, MemoryReport)
    for rank, found in lifetimes(planned.plan, call_layouts()).items():
        profile = memory_profile(found)

        times_s = tick_times_s(profile, planned.simulation)
        drawn = peaks_of(times_s, profile.total, planned.simulation.step_s)

        assert times_s == sorted(times_s)
        assert times_s[0] >= 0 and times_s[-1] <= planned.simulation.step_s
        assert drawn == sorted(drawn)
        assert max(profile.total[tick] for tick in drawn) == planned.memory.ranks[rank].peak


def test_a_limit_is_drawn_where_it_is_near_and_told_where_it_is_far() -> None:
    planned = found_plan("replicated")
    profile = memory_profile(lifetimes(planned.plan, call_layouts())[0])
    peak = max(profile.total)

    near = memory_chart(profile, planned.simulation, 2 * peak, "rank 0")
    far = memory_chart(profile, planned.simulation, 10 * peak, "rank 0")

    assert 'class="limit"' in near and "50% of the limit" in near
    assert 'class="limit"' not in far and "10% of the limit" in far


def test_a_mesh_has_a_cell_a_rank_and_says_of_large_ones_their_shape() -> None:
    cluster = replace(Cluster.nominal(1024), devices_per_node=2)
    small = mesh_drawing((Placement.grid((2, 3), ("data", "tensor")),), cluster)
    large = mesh_drawing((Placement.grid((64, 16), ("data", "tensor")),), cluster)

    assert small.count("<rect") == 6 and "rank 5 on node 2" in small
    assert "<svg" not in large and "1024 ranks" in large


def test_bars_are_shares_of_the_step_with_what_they_are_made_of() -> None:
    bars = (
        Bar(label="0", kind="F", start_s=0.0, end_s=1.0, detail="a & b"),
        Bar(label="0", kind="B", start_s=1.0, end_s=4.0, detail=""),
    )

    drawn = timeline_chart(Timeline(title="a step", lanes=(Lane(name="rank 0", bars=bars),)))

    assert 'x="25.000%"' in drawn and 'width="75.000%"' in drawn
    assert "a &amp; b: 0 µs to 1 s" in drawn and ">backward<" in drawn


@given(st.floats(1e-9, 1e12), st.integers(2, 12))
def test_ticks_are_few_round_and_evenly_spaced(end: float, most: int) -> None:
    ticks = round_ticks(end, most)

    assert ticks[0] == 0 and len(ticks) <= most + 1
    assert all(0 <= tick <= end for tick in ticks)
    if len(ticks) > 1:
        assert f"{ticks[1]:.6e}"[0] in "125"
        assert all(tick == pytest.approx(n * ticks[1]) for n, tick in enumerate(ticks))


def _luminance(colour: str) -> float:
    """Return the relative luminance of `#rrggbb`. Source: WCAG 2.1, 1.4.3."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_each_kind_of_memory_has_a_colour_of_its_own() -> None:
    assert MEMORY.keys() == set(MemoryKind)
    assert len(set(MEMORY.values())) == len(MEMORY)


def test_dark_text_is_legible_on_every_fill() -> None:
    style = page_of("replicated")
    fills = [*MEMORY.values(), *STAGES, *re.findall(r"\.sbp\.\w+ \{ background: (#\w{6})", style)]
    stripes = re.findall(r"repeating-linear-gradient\(135deg, (#\w{6})[^#]*(#\w{6})", style)

    assert len(fills) > len(MEMORY) + len(STAGES) and stripes
    for fill in (*fills, *stripes[0]):
        contrast = (_luminance(fill) + 0.05) / (_luminance("#10202e") + 0.05)
        assert contrast >= 4.5, fill


def test_each_sbp_has_a_chip_with_its_text_and_its_axis() -> None:
    made = chips("(S(0), P)", ("data", "tensor"))

    assert 'class="sbp s0" title="data: S(0)">S(0)<' in made
    assert 'class="sbp p" title="tensor: P">P<' in made
    assert chips("", ("data",)) == ""


def test_a_page_is_written_and_its_name_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"

    draw_page(found_plan("replicated"), "bigram", str(path))

    assert capsys.readouterr().out == f"wrote {path}\n"
    assert "bigram on 2 ranks" in path.read_text("utf-8")


def test_another_plan_stands_beside_it_with_what_is_printed_of_both() -> None:
    this, other = found_plan("replicated"), found_plan("sharded")

    text = plan_page(this, "bigram", ("runs/<other>", other))

    page = _Page(text)
    assert page.open == []
    words = {word.strip() for word in page.words}
    for cells in figure_rows(this, other):
        assert {cell.strip() for cell in cells} <= words | {""}
    assert "runs/<other>" in words and "Next to another plan" in words
    assert "Next to another plan" not in page_of("replicated")


def test_a_page_says_how_fast_the_plan_is_and_sets_details_of_reasons_apart() -> None:
    planned = found_plan("replicated")
    report = {"explanation": ["auto: one of two", "  the other: 3 ms <slower>"]}
    strategy = replace(planned.strategy, report=report)

    text = plan_page(replace(planned, strategy=strategy), "bigram")

    assert re.search(
        r"<span class=\"speed\">[\d.,]+ samples/s, MFU [\d.]+% of the rates of cluster=", text
    )
    assert "<li>auto: one of two</li>" in text
    count = sum(row.num_parameters for row in planned.module_rows)
    assert f"<dt>parameters of the model</dt><dd>{count:,}</dd>" in text
    assert "<li class=inner>the other: 3 ms &lt;slower&gt;</li>" in text


def test_layers_of_one_stage_are_told_by_their_numbers() -> None:
    planned = found_plan("pipeline of meshes")
    rows = planned.module_rows
    assert len({row.stage for row in rows}) > 1
    named = [group.name.partition(" ")[0] for group in groups_of(rows) if group.name]

    tree = model_tree(rows, planned.strategy.stages)

    assert named
    assert all(f'<span class="name">{name}' in tree for name in named)
    assert "blocks.*" not in tree


def test_kinds_of_bars_look_alike_on_all_pages() -> None:
    few, many = looks_of(["F", "transfer", "other"]), looks_of(["other", "update", "transfer", "F"])

    assert few["transfer"] == many["transfer"]
    assert len({look.fill for look in many.values()}) == 4


@pytest.mark.parametrize("name", ["plan.txt", "missing/plan.html"])
def test_a_place_where_no_page_can_be_is_refused_before_anything_is_planned(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match="page="):
        PlanConfig(page=str(tmp_path / name))
