"""A page with a timeline: one HTML file that needs no other, and no network."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from string import Template

from sbp_core.timeline import Timeline
from sbp_launch.timelines.svg import svg

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b2733; --line: #d5dbe1; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #14191f; --ink: #e4e9ee; --line: #38424d; }
}
body { margin: 2rem; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; font-weight: 600; }
table { border-collapse: collapse; margin: 1rem 0 1.5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.5rem .25rem 0; border-bottom: 1px solid var(--line);
  text-align: left; font-weight: normal; vertical-align: top; }
th { opacity: .75; white-space: nowrap; }
.timeline { overflow-x: auto; padding-bottom: .5rem; }
</style>
</head>
<body>
<h1>$title</h1>
<table>
$facts
</table>
<div class="timeline">
$drawing
</div>
</body>
</html>
""")


def page(timeline: Timeline, facts: Mapping[str, str]) -> str:
    """Return a page with a title, a table of facts, and the timeline, which scrolls if wide."""
    rows = (
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return _PAGE.substitute(
        title=escape(timeline.title), facts="\n".join(rows), drawing=svg(timeline)
    )
