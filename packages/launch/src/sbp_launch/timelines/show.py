"""Show a timeline to who called a command: in the terminal, and as files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from sbp_core.timeline import Timeline
from sbp_launch.timelines.page import page
from sbp_launch.timelines.svg import svg
from sbp_launch.timelines.terminal import terminal_lines

#: Of the drawings of a timeline.
ENDINGS = (".svg", ".html")


def show(timeline: Timeline, console: Console) -> None:
    """Draw a timeline in the terminal: with colours, or with letters where there are none."""
    coloured = console.is_terminal and console.color_system is not None
    for line in terminal_lines(timeline, width=console.width, coloured=coloured):
        if coloured:
            console.print(line, no_wrap=True, crop=False)
        else:
            sys.stdout.write(f"{line.plain.rstrip()}\n")


def write_drawings(timeline: Timeline, facts: Mapping[str, str], out: str) -> None:
    """Write a timeline as SVG, and as a page with some facts; say so."""
    drawings = zip(ENDINGS, (svg(timeline), page(timeline, facts)), strict=True)
    for ending, drawing in drawings:
        Path(out + ending).write_text(drawing, encoding="utf-8")
        sys.stdout.write(f"wrote {out}{ending}\n")
