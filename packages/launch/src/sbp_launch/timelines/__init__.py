"""Pictures of a `sbp_core.timeline.Timeline`: in the terminal, as SVG, and as a page.

`style` says what kinds of bars look like, `terminal` draws with columns, `svg` with pixels, `page`
puts the drawing and some facts into one HTML file that needs no other.

Stability: internal.
"""

from __future__ import annotations

from sbp_launch.timelines.page import page
from sbp_launch.timelines.svg import svg
from sbp_launch.timelines.terminal import terminal_lines

__all__ = ["page", "svg", "terminal_lines"]
