"""Which ways of splitting an operator call along single mesh axes are legal together.

A signature says how each input and output of a call is split, replicated or partial. `derivations`
finds those on one axis; here, one for each axis makes a signature of the mesh. `sbp_core.infer`
asks axis by axis (`continuations`); whoever measures or verifies operators asks for all
(`enumerate_signatures`).

Axes combine freely, with two exceptions: axes that split the same label (a letter of the operator's
rule, such as `i` in `i k, k j -> i j`) must meet its `Requirement` together, and no tensor is
partial under two reductions. In a merged dim (a b), a later axis may split b once earlier ones have
split a down to one element; see `conflict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from sbp_core.sbp import NdSbp, Partial
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import derivation, derive
from sbp_core.signatures.rule_registry import RuleRegistry
from sbp_core.signatures.signature import Signature1d
from sbp_core.strategy import Signature


def enumerate_signatures(
    call: OpCall, mesh_shape: Sequence[int], *, rules: RuleRegistry | None = None
) -> Iterator[Signature]:
    """Yield the legal signatures of a call on a mesh, with one entry of `mesh_shape` per axis.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    yield from (combine(parts) for parts in _extend(call, (), mesh_shape, rules))


def _extend(
    call: OpCall,
    before: tuple[Signature1d, ...],
    mesh_shape: Sequence[int],
    rules: RuleRegistry | None,
) -> Iterator[tuple[Signature1d, ...]]:
    if len(before) == len(mesh_shape):
        yield before
        return
    for part in continuations(call, before, mesh_shape[: len(before) + 1], rules=rules):
        yield from _extend(call, (*before, part), mesh_shape, rules)


def continuations(
    call: OpCall,
    before: tuple[Signature1d, ...],
    mesh_shape: Sequence[int],
    *,
    rules: RuleRegistry | None = None,
) -> tuple[Signature1d, ...]:
    """Return the legal signatures on the last axis of a mesh, given signatures on earlier axes.

    Args:
        call: The call.
        before: A signature for each axis but the last.
        mesh_shape: Sizes of the axes.
        rules: The rules to use; the installed rules if omitted.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    found = derivation(call, rules)
    candidates = (*derive(call, mesh_shape[-1], rules=rules), *(found.behind if before else ()))
    return tuple(part for part in candidates if not conflict((*before, part), mesh_shape))


def combine(parts: Sequence[Signature1d]) -> Signature:
    """Return the signature with the entries of `parts`, one part for each mesh axis."""
    return Signature(
        tuple(NdSbp(*entries) for entries in zip(*(part.inputs for part in parts), strict=True)),
        tuple(NdSbp(*entries) for entries in zip(*(part.outputs for part in parts), strict=True)),
    )


def conflict(parts: Sequence[Signature1d], mesh_shape: Sequence[int]) -> str:
    """Return why signatures, each legal on its axis, are not legal together; empty if they are.

    A dim (a b) with a = 2 on a mesh of 2 x 3: axis 0 splits a, and axis 1 may then split b, because
    each shard of axis 0 holds one element of a, so that the shards of b in it are contiguous:

        a0b0 a0b1 a0b2 | a1b0 a1b1 a1b2        axis 0
        a0b0|a0b1|a0b2 | a1b0|a1b1|a1b2        axis 1
    """
    for axis, part in enumerate(parts):
        for requirement in part.requires:
            sizes = [
                size
                for other, size in zip(parts, mesh_shape, strict=True)
                if any(entry.label == requirement.label for entry in other.requires)
            ]
            failure = requirement.failure(prod(sizes))
            if failure:
                return f"{part.origin} {failure} (mesh axes of sizes {sizes} together)"
        for label, extent in part.follows:
            split = [mesh_shape[at] for at in range(axis) if parts[at].label == label]
            if prod(split) != extent:
                return (
                    f"{part.origin} needs the mesh axes before it to split label {label} into "
                    f"{extent} parts, not {prod(split)}"
                )
    return _mixed_partial(parts)


def _mixed_partial(parts: Sequence[Signature1d]) -> str:
    """Return the tensor that would be partial under two reductions at once; empty if none.

    A sum of maxima is not a maximum of sums: the meaning of such a tensor would depend on order.
    """
    for entries in zip(*((*part.inputs, *part.outputs) for part in parts), strict=True):
        kinds = {entry.reduction for entry in entries if isinstance(entry, Partial)}
        if len(kinds) > 1:
            return f"one tensor would be partial under {' and '.join(sorted(kinds))} at once"
    return ""
