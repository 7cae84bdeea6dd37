"""Compute the size of each einsum-like label of an operator call, and check the call's shapes.

A label of the operator's `notation` has one extent (size) in all tensors in which it occurs:

    i k, k j -> i j     mm of (4, 3), (3, 5) giving (4, 5)    i = 4, k = 3, j = 5
                        mm of (4, 3), (2, 5) giving (4, 5)    refused: k is 3 and 2
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import refs
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation
from sbp_core.signatures.rule import Rule
from sbp_core.signatures.rule_registry import RuleRegistry, installed_rules


def check_shapes(call: OpCall, *, rules: RuleRegistry | None = None) -> None:
    """Check that the shapes of a call agree with the meaning of its operator.

    Kernels that compute gradients assume this; some write out of bounds if it does not hold.

    Raises:
        SignatureError: they do not agree, or the operator has no rule.
    """
    label_sizes(call, notation_of((rules or installed_rules()).rule(call), call))


def notation_of(rule: Rule, call: OpCall) -> Notation:
    """Return the notation of a call; raise if it depends on a number known only at run time."""
    try:
        return rule.notation(call)
    except TypeError as error:
        known = set(call.tensor_names)
        host = [ref.name for ref in refs((call.args, tuple(call.kwargs.values())))]
        unknown = [name for name in host if name not in known]
        if not unknown:
            raise
        raise SignatureError(
            f"the splits of {call.op} depend on {unknown[0]!r}, a number of the running program",
            where=call.where,
            accepted="a constant",
            todo="compute it outside of the captured step",
        ) from error


def label_sizes(call: OpCall, notation: Notation) -> dict[str, int]:
    """Return the extent of each label that the shapes determine.

    Raises:
        SignatureError: the notation does not fit the shapes of the call.
    """
    _check_fit(len(call.inputs) == len(notation.inputs), call, notation)
    _check_fit(len(call.outputs) == len(notation.outputs), call, notation)
    # If all labels of a dim but one are known, the dim gives that one, and a label may be known
    # from another tensor only. So rounds repeat until one finds nothing new:
    #
    #     (b t) d, b -> ..  of shapes (12, 8), (3,)    round 1: d = 8, b = 3    round 2: t = 12 / 3
    pairs = list(_dims(call, notation))
    sizes = dict(notation.sizes)
    while True:
        found: dict[str, int] = {}
        for names, extent in pairs:
            # With a known label of extent 0 the dim is empty whatever the others are: it does not
            # determine them.
            known = prod(sizes.get(name, 1) for name in names)
            unknown = [name for name in names if name not in sizes]
            fits = known == 0 or extent % known == 0 if unknown else known == extent
            _check_fit(fits, call, notation)
            if len(unknown) == 1 and known:
                found[unknown[0]] = extent // known
        if not found:
            return sizes
        sizes |= found


def _check_fit(fits: bool, call: OpCall, notation: Notation) -> None:
    if not fits:
        inputs = ", ".join(str(entry.shape) for entry in call.inputs)
        outputs = ", ".join(str(entry.shape) for entry in call.outputs)
        raise SignatureError(
            f"the notation '{notation}' does not fit {call.op} of {inputs} giving {outputs}",
            where=call.where,
            accepted="a notation with these arguments, dims and extents",
            todo=f"correct the rule of {call.op}",
        )


def _dims(call: OpCall, notation: Notation) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield (labels, extent) of every dim of every tensor."""
    types = (*call.inputs, *call.outputs)
    for entry, dims in zip(types, (*notation.inputs, *notation.outputs), strict=True):
        _check_fit(len(entry.shape) == len(dims), call, notation)
        yield from zip(dims, entry.shape, strict=True)
