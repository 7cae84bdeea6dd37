"""Another plan beside this one on its page: figures, and which modules are cut otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from sbp_launch.explaining.compare import changed_rows, figure_rows, plan_text
from sbp_launch.planning.flow import Planned


def beside(this: Planned, other: Planned, name: str) -> str:
    """Return the comparison of a plan with another one.

    Args:
        this: The plan of the page.
        other: The other one, of the same model.
        name: What the other one is called.
    """
    figures = figure_rows(this, other)
    said, *changed = changed_rows(this, other, name)
    modules = "".join(_row([head, what, _arrow(text)], "") for head, what, text in changed)
    more = (
        f'<table class="traffic"><thead><tr><th>module</th><th>what</th><th>this plan \u2192 '
        f"{escape(name)}</th></tr></thead><tbody>{modules}</tbody></table>"
        if changed
        else ""
    )
    return (
        f"<p>{escape(name)}: {escape(plan_text(other.strategy))}</p>"
        '<table class="traffic"><thead><tr><th></th><th class="figure">this plan</th>'
        f'<th class="figure">{escape(name)}</th><th class="figure">change</th></tr></thead>'
        f"<tbody>{''.join(_row(row, 'figure') for row in figures)}</tbody></table>"
        f"<p>{escape(_arrow(said[0]))}</p>{more}"
    )


def _row(cells: Sequence[str], style: str) -> str:
    """Return a row of a table whose first cell is its head; indented if its text is."""
    name, *rest = cells
    inner = ' style="padding-left:1.2rem"' if name.startswith(" ") else ""
    return (
        f'<tr><th scope="row"{inner}>{escape(name.strip())}</th>'
        + "".join(_cells(rest, style))
        + "</tr>"
    )


def _cells(texts: Iterable[str], style: str) -> Iterable[str]:
    return (f'<td class="{style}">{escape(text)}</td>' for text in texts)


def _arrow(text: str) -> str:
    return text.replace("->", "\N{RIGHTWARDS ARROW}")
