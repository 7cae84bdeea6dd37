"""Prefer one of several equally cheap shardings by a tiny extra cost, in `infer.problem`.

Fewer bytes, then B, then low dims, then partial values; views of gradients prefer to pass partial
values on.
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.sbp import Broadcast, Partial, Sbp, Split
from sbp_core.signatures.signature import Signature1d

#: Weights of the tie-break: seconds for each byte, and for each step away from B.
TIE_S_PER_BYTE = 1e-18
_TIE_S_PER_RANK = 1e-15


def signature_tie_break(passes_on: bool, part: Signature1d) -> float:
    """Return the tie-break of a signature; views of gradients pass partial values on.

    Gradients that only the optimizer reduces can then share a bucket (`compile.buckets`).

    before: g@(B) = all-reduce(g); view(g@(B)); update(..)      g of the backward phase
    after:  view(g); view@(B) = all-reduce(view); update(..)
    """
    entries = (*part.inputs, *part.outputs)
    if not passes_on:
        return sum(map(entry_tie_break, entries))
    return sum(
        0.0 if isinstance(e, Partial) else _TIE_S_PER_RANK + entry_tie_break(e) for e in entries
    )


class SignatureTieBreaks:
    """`signature_tie_break` for signatures on several axes, which combine few on one axis.

    Ids identify signatures, so they live as long as this.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], float] = {}

    def of(self, parts: Sequence[Signature1d], passes_on: bool) -> float:
        """Return the sum over the axes; see `signature_tie_break`."""
        found = 0.0
        for part in parts:
            key = (id(part), passes_on)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = signature_tie_break(passes_on, part)
            found += known
        return found


def entry_tie_break(entry: Sbp) -> float:
    """Return the tie-break of one entry: B before low dims before partial values."""
    if isinstance(entry, Broadcast):
        return 0.0
    return _TIE_S_PER_RANK * (1 + entry.dim if isinstance(entry, Split) else 20)
