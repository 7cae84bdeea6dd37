"""Colours of a plan's page: light fills, on which dark text is read in light and dark mode.

Fills of one set differ in lightness and hue, so that those who see few hues tell them apart; and
none stands alone: SBPs are written on their colour, and each set has a legend.

Source: the hues are those of Okabe and Ito, "Color Universal Design", 2008, made paler.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from types import MappingProxyType

from sbp_core.memory import MemoryKind
from sbp_core.sbp import Broadcast, NdSbp, Partial, Sbp, Split

#: By the dim that is split; further dims share the last one.
_SPLITS = ("s0", "s1", "s2", "s3", "s4")

#: Of parts of the memory of a rank.
MEMORY: Mapping[MemoryKind, str] = MappingProxyType(
    {
        MemoryKind.PARAMETERS: "#7fb2dd",
        MemoryKind.STATES: "#bcd9ef",
        MemoryKind.BUFFERS: "#8f9aa5",
        MemoryKind.BATCH: "#d3d9de",
        MemoryKind.GATHERED: "#b9a2dd",
        MemoryKind.FETCHED: "#e8b394",
        MemoryKind.GRADIENTS: "#e7b0cb",
        MemoryKind.ACTIVATIONS: "#f3c26b",
        MemoryKind.COMMUNICATION: "#6fbfa5",
        MemoryKind.TEMPORARIES: "#f6e39a",
    }
)

#: Of stages, one after the other.
STAGES = ("#bcd9ef", "#f7d9a4", "#bfe3cf", "#d9caf0", "#f5c6d6", "#dfe5a8", "#c9e7ec", "#e8d3c0")


def sbp_class(entry: Sbp) -> str:
    """Return the class of the style sheet that an SBP of one axis has."""
    if isinstance(entry, Broadcast):
        return "b"
    if isinstance(entry, Partial):
        return "p"
    assert isinstance(entry, Split), "an entry is S, B or P"
    return _SPLITS[min(entry.dim, len(_SPLITS) - 1)]


def chips(text: str, axes: tuple[str, ...]) -> str:
    """Return an nd-SBP as coloured chips, one for each mesh axis.

    Args:
        text: `(S(0), B)`, with or without parentheses; or empty, for no chips.
        axes: Names of the axes.
    """
    if not text:
        return ""
    entries = NdSbp.parse(text[1:-1] if text.startswith("(") else text)
    made = "".join(
        f'<span class="sbp {sbp_class(entry)}" title="{escape(axis)}: {escape(str(entry))}">'
        f"{escape(str(entry))}</span>"
        for axis, entry in zip(axes, entries, strict=True)
    )
    return f'<span class="chips">{made}</span>'


def legend(entries: Mapping[str, str]) -> str:
    """Return a legend: a square of each colour, and what it is.

    Args:
        entries: Colour by name.
    """
    made = "".join(
        f'<li><span class="swatch" style="background:{colour}"></span>{escape(name)}</li>'
        for name, colour in entries.items()
    )
    return f'<ul class="legend">{made}</ul>'
