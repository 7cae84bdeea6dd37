"""Timelines drawn in the terminal, as SVG and as a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from sbp_core.errors import SbpValueError
from sbp_core.timeline import Bar, Lane, Timeline
from sbp_launch.explaining.timelines import page, svg, terminal_lines

SVG = "{http://www.w3.org/2000/svg}"


def _timeline(num_bars: int = 8, name: str = "rank 0", label: str = "") -> Timeline:
    lanes = tuple(
        Lane(
            name=f"{name}{lane}",
            bars=tuple(
                Bar(
                    label=label or str(k),
                    kind="FB"[k % 2],
                    start_s=lane + 3.0 * k,
                    end_s=lane + 3.0 * k + 1 + k % 2,
                )
                for k in range(num_bars)
            ),
        )
        for lane in range(3)
    )
    return Timeline(title="a <title>", lanes=lanes)


def test_a_bar_does_not_end_before_it_begins() -> None:
    with pytest.raises(SbpValueError, match="before it begins"):
        Bar(label="0", kind="F", start_s=1.0, end_s=0.5)


def test_a_picture_without_colours_tells_kinds_by_letters() -> None:
    text = [line.plain for line in terminal_lines(_timeline(2), width=60, coloured=False)]

    assert re.fullmatch(r"rank 00 │F0·+ +B1·+ *", text[1])
    assert text[-1] == "F forward  B backward"


@pytest.mark.parametrize("coloured", [False, True])
@pytest.mark.parametrize("width", [30, 47, 80, 200])
@pytest.mark.parametrize("num_bars", [1, 8, 200])
def test_a_picture_fits_the_width(width: int, num_bars: int, *, coloured: bool) -> None:
    lines = terminal_lines(_timeline(num_bars), width=width, coloured=coloured)

    assert all(len(line.plain.rstrip()) <= width for line in lines)


def test_what_is_too_wide_goes_on_below() -> None:
    wide, narrow = (
        [line.plain for line in terminal_lines(_timeline(), width=width, coloured=False)]
        for width in (200, 50)
    )

    assert len(wide) == 5
    assert len(narrow) > len(wide)
    for number in range(8):
        named = f"{'FB'[number % 2]}{number}"
        assert sum(line.count(named) for line in narrow[:-1]) == 3


def test_bars_begin_where_their_time_is() -> None:
    lines = [line.plain for line in terminal_lines(_timeline(2), width=60, coloured=False)]
    first, second = (line.split("│")[1] for line in lines[1:3])

    assert second.index("F0") - first.index("F0") == (first.index("B1") - first.index("F0")) / 3


def test_a_timeline_without_bars_is_no_picture() -> None:
    empty = Timeline(title="empty", lanes=(Lane(name="rank 0", bars=()),))

    assert terminal_lines(empty, width=80, coloured=True) == []
    assert ElementTree.fromstring(svg(empty)).tag == f"{SVG}svg"


def test_a_drawing_has_a_bar_for_each_bar_and_says_what_it_is() -> None:
    drawing = ElementTree.fromstring(svg(_timeline(8, label="<&>")))
    bars = drawing.findall(f"{SVG}g")

    assert len(bars) == 24
    assert bars[1].findtext(f"{SVG}title") == "backward: 3 to 5 s"
    assert bars[1].findtext(f"{SVG}text") == "<&>"
    boxes = [bar.find(f"{SVG}rect") for bar in bars]
    lefts = [float(box.attrib["x"]) for box in boxes if box is not None]
    assert lefts[1] - lefts[0] == pytest.approx(3 * (lefts[8] - lefts[0]), abs=0.05)
    assert max(lefts) < float(drawing.attrib["width"])


def test_a_page_needs_no_other_file() -> None:
    text = page(_timeline(), {"makespan": "3 < 4"})

    assert "<title>a &lt;title&gt;</title>" in text
    assert "3 &lt; 4" in text
    assert "src=" not in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
