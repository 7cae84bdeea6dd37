"""What kinds of bars look like, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How bars of a kind are drawn.

    Args:
        fill: The colour of the bar, `#rrggbb`.
        ink: The colour of what is written on it, with a contrast of at least 4.5.
        name: What the legend says.
    """

    fill: str
    ink: str
    name: str


_DARK, _LIGHT = "#10202e", "#ffffff"

_KNOWN: Mapping[str, Look] = MappingProxyType(
    {
        "F": Look(fill="#2f6db0", ink=_LIGHT, name="forward"),
        "B": Look(fill="#f2994a", ink=_DARK, name="backward"),
        "I": Look(fill="#f2c14e", ink=_DARK, name="input gradient"),
        "W": Look(fill="#5fb58c", ink=_DARK, name="weight gradient"),
        # Of plans: the same in all of them, whatever else there is.
        "update": Look(fill="#f4a6a6", ink=_DARK, name="update"),
        "collective": Look(fill="#8ecae6", ink=_DARK, name="collective"),
        "transfer": Look(fill="#c9a7eb", ink=_DARK, name="transfer"),
    }
)

#: For other kinds, in the order in which they first begin.
_FILLS = ("#b5c99a", "#d9d9d9", "#8fb8a8", "#d8a48f", "#e9c46a", "#a3a1d6")

_FADING = 0.22
"""So much closer to white each further chunk of a rank is drawn."""


def looks_of(kinds: Sequence[str]) -> Mapping[str, Look]:
    """Return how each kind is drawn."""
    others = [kind for kind in kinds if kind not in _KNOWN]
    return {
        kind: _KNOWN[kind]
        if kind in _KNOWN
        else Look(fill=_FILLS[others.index(kind) % len(_FILLS)], ink=_DARK, name=kind)
        for kind in kinds
    }


def faded(look: Look, chunk: int) -> Look:
    """Return the look of a rank's further chunks: paler ones, of the same colour."""
    share = min(chunk, 3) * _FADING
    if not share:
        return look
    parts = [int(look.fill[at : at + 2], 16) for at in (1, 3, 5)]
    pale = "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
    return Look(fill=f"#{pale}", ink=_DARK, name=look.name)


def short(number: float) -> str:
    """Return a time without digits that say nothing: 24, 4.5, 0.0313."""
    return f"{number:.6g}"
