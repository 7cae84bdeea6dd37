"""Pictures of a `sbp_core.timeline.Timeline`: in the terminal, as SVG, and as a page.

`style` says what kinds of bars look like, `terminal` draws with columns, `svg` with pixels, `page`
puts the drawing and some facts into one HTML file that needs no other; `show` is for commands.

Stability: internal.
"""

from __future__ import annotations

from sbp_launch.timelines.page import page
from sbp_launch.timelines.show import ENDINGS, show, write_drawings
from sbp_launch.timelines.svg import svg
from sbp_launch.timelines.terminal import terminal_lines

__all__ = ["ENDINGS", "page", "show", "svg", "terminal_lines", "write_drawings"]
