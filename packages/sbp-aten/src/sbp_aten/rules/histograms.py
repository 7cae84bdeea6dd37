"""Histograms: counts, or sums of weights, of the elements that fall into bins.

    n d0, n d0 => bins!, edges!  the elements are summed away; the edges do not hang on them

If no range is given the extremes of all elements make the edges, and a density is divided by the
sum of all counts: then the elements are needed whole.
"""

from __future__ import annotations

from sbp_core.signatures import Dims, Notation, OpCall, Rule, fresh_dims, linear

_RANGE = "the extremes of all elements make the edges of the bins"
_DENSITY = "a density is divided by the sum of all counts"


def _why(call: OpCall, *, ranged: bool) -> str:
    """Return why elements are needed whole; empty if they are not."""
    if not ranged and call.kwargs.get("range") is None:
        return _RANGE
    return _DENSITY if call.kwargs.get("density") else ""


def _notation(call: OpCall, *, ranged: bool, counts: bool, coordinates: bool) -> Notation:
    """Return the notation of a histogram.

    Args:
        call: The call: elements, edges if they are given, weights if they are given.
        ranged: Whether the edges are given.
        counts: Whether output 0 holds counts; all others hold edges.
        coordinates: Whether the last dim of the elements (`x!`) holds coordinates of one.
    """
    shape = call.inputs[0].shape
    points = fresh_dims(len(shape) - coordinates, "n")
    elements: Dims = (*points, ("x",)) if coordinates else points
    weighted = call.kwargs.get("weight") is not None
    given = call.inputs[1 : len(call.inputs) - weighted]
    edges = [fresh_dims(len(entry.shape), f"e{index}_") for index, entry in enumerate(given)]
    made = [fresh_dims(len(entry.shape), f"o{index}_") for index, entry in enumerate(call.outputs)]
    why = _why(call, ranged=ranged)
    names = [name for (name,) in points]
    own = {name for dims in (*edges, *made) for (name,) in dims} | {"x"} & {*("x" * coordinates)}
    firsts = range(int(counts), len(call.outputs))
    # Weights are summed up, unless the sums are divided by their sum.
    summed = weighted and counts and not call.kwargs.get("density")
    return Notation(
        inputs=(elements, *edges, *((points,) if weighted else ())),
        outputs=tuple(made),
        dependences=(linear(len(call.inputs) - 1, outputs=(0,)),) if summed else (),
        whole=frozenset(own | (set(names) if why else set())),
        reductions=tuple((f"{name}@{output}", "none") for name in names for output in firsts),
        why=why or "an element may fall into any bin",
    )


def _rule(*, ranged: bool, counts: bool = True, coordinates: bool = False) -> Rule:
    """Return the rule of a histogram; see `_notation`."""
    return Rule(lambda call: _notation(call, ranged=ranged, counts=counts, coordinates=coordinates))


RULES = {
    "aten._histogramdd_bin_edges.default": _rule(ranged=False, counts=False, coordinates=True),
    "aten._histogramdd_from_bin_cts.default": _rule(ranged=False, coordinates=True),
    "aten._histogramdd_from_bin_tensors.default": _rule(ranged=True, coordinates=True),
    "aten.histogram.bin_ct": _rule(ranged=False),
    "aten.histogram.bins_tensor": _rule(ranged=True),
}
