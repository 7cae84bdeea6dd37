"""Check that an operator call may be split over a mesh as a strategy says (its signature).

`compile.legality` checks every call of a strategy. The error message names the nearest legal
signatures, why other signatures fail, and the communication (boxing) that would make the signature
legal, with its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sbp_core.boxing.router import route
from sbp_core.boxing.routes import Route
from sbp_core.errors import SbpValueError, SignatureError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, Partial, Sbp, Split, check_sbp
from sbp_core.signatures.axes import conflict
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import derivation, derive
from sbp_core.signatures.rule_registry import RuleRegistry
from sbp_core.signatures.signature import Signature1d
from sbp_core.strategy import Signature
from sbp_core.units import format_bytes

#: How many of the nearest legal signatures a message lists.
_NUM_NEAREST = 3


def check_signature(
    call: OpCall, signature: Signature, mesh: Placement, *, rules: RuleRegistry | None = None
) -> None:
    """Check that a call may be cut by `signature` on a mesh.

    Raises:
        SignatureError: it may not; the message names legal signatures, and how to get there.
        SbpValueError: an SBP does not fit the shape of its tensor or the mesh.
    """
    _check_arity(call, signature)
    _check_fit(call, signature, mesh)
    parts: list[Signature1d] = []
    for axis, size in enumerate(mesh.mesh_shape):
        asked = _along(signature, axis)
        legal = (
            *derive(call, size, rules=rules),
            *(derivation(call, rules).behind if axis else ()),
        )
        found = next((part for part in legal if (part.inputs, part.outputs) == asked), None)
        if found is None:
            raise _refusal(call, signature, mesh, axis, rules)
        parts.append(found)
    together = conflict(parts, mesh.mesh_shape)
    if together:
        raise SignatureError(
            f"{call.op} cannot run as {signature} on a mesh of shape {mesh.mesh_shape}: {together}",
            where=call.where,
            accepted="any one of these mesh axes alone",
            todo="split another dim on one of the axes",
        )


def _check_fit(call: OpCall, signature: Signature, mesh: Placement) -> None:
    """Check that every entry fits its tensor; the error names the tensor and the op."""
    outputs = (f"output {index}" for index in range(len(call.outputs)))
    names = [*(repr(name) for name in call.tensor_names), *outputs]
    types = (*call.inputs, *call.outputs)
    sbps = (*signature.inputs, *signature.outputs)
    for name, entry, sbp in zip(names, types, sbps, strict=True):
        try:
            check_sbp(entry.shape, sbp, mesh.mesh_shape)
        except SbpValueError as error:
            raise error.replaced(
                SbpValueError, where=(f"{name} of {call.op}", *call.where, *error.where)
            ) from None


def _check_arity(call: OpCall, signature: Signature) -> None:
    asked = (len(signature.inputs), len(signature.outputs))
    if asked != (len(call.inputs), len(call.outputs)):
        raise SignatureError(
            f"{call.op} takes {_tensors(len(call.inputs))} and gives {len(call.outputs)}, the "
            f"signature {signature} takes {asked[0]} and gives {asked[1]}",
            where=call.where,
            accepted="one nd-SBP for each tensor argument and each output",
        )


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


def _along(signature: Signature, axis: int) -> tuple[tuple[Sbp, ...], tuple[Sbp, ...]]:
    """Return the entries of a signature on one mesh axis."""
    return (
        tuple(sbp[axis] for sbp in signature.inputs),
        tuple(sbp[axis] for sbp in signature.outputs),
    )


def _text(inputs: Sequence[Sbp], outputs: Sequence[Sbp]) -> str:
    return f"{NdSbp(*inputs)} -> {NdSbp(*outputs)}"


def _refusal(
    call: OpCall, signature: Signature, mesh: Placement, axis: int, rules: RuleRegistry | None
) -> SignatureError:
    """Make the error for a signature that is not legal on one mesh axis."""
    size = mesh.mesh_shape[axis]
    asked = _along(signature, axis)
    legal = sorted(
        derive(call, size, rules=rules),
        key=lambda part: _distance(part, call, signature, mesh, axis),
    )
    nearest = legal[:_NUM_NEAREST]
    listed = "; ".join(f"{_text(part.inputs, part.outputs)} ({part.origin})" for part in nearest)
    reasons = _reasons(call, asked, size, rules)
    return SignatureError(
        f"{_complaint(call, signature, axis, nearest[0])} "
        f"on mesh axis {mesh.axes[axis]!r} of size {size}",
        where=call.where,
        accepted=listed + (f"\n  not here: {'; '.join(reasons)}" if reasons else ""),
        todo=_boxing(call, signature, mesh, axis, nearest[0]),
    )


def _complaint(call: OpCall, signature: Signature, axis: int, nearest: Signature1d) -> str:
    """Return which argument is in the way of the nearest legal signature, in words."""
    for index, (sbp, legal) in enumerate(zip(signature.inputs, nearest.inputs, strict=True)):
        entry = sbp[axis]
        if entry != legal:
            name, shape = call.tensor_names[index], call.inputs[index].shape
            verb = f"split dim {entry.dim} of" if isinstance(entry, Split) else f"take {entry} of"
            made = ", ".join(str(output.shape) for output in call.outputs)
            return f"cannot {verb} {name!r} (shape {shape}) for {call.op} to {made}"
    return f"{call.op} does not give {_text(*_along(signature, axis))}"


def _distance(
    part: Signature1d, call: OpCall, signature: Signature, mesh: Placement, axis: int
) -> tuple[int, int, int]:
    """Rank a legal signature: differing entries, unwanted partial values, bytes to box."""
    inputs, outputs = _along(signature, axis)
    asked, legal = (*inputs, *outputs), (*part.inputs, *part.outputs)
    wrong = [(old, new) for old, new in zip(asked, legal, strict=True) if old != new]
    partials = sum(isinstance(new, Partial) for _, new in wrong)
    if partials:
        return len(wrong), partials, 0
    return len(wrong), 0, sum(way.bytes for _, way in _ways(call, signature, mesh, axis, part))


def _ways(
    call: OpCall, signature: Signature, mesh: Placement, axis: int, part: Signature1d
) -> Iterator[tuple[int, Route]]:
    """Yield (position, route) of each input that differs from a legal signature."""
    for index, (sbp, legal) in enumerate(zip(signature.inputs, part.inputs, strict=True)):
        if sbp[axis] != legal:
            entry = call.inputs[index]
            target = (mesh, sbp.replace(axis, legal))
            yield index, route(entry.shape, entry.dtype, (mesh, sbp), target)


def _reasons(
    call: OpCall,
    asked: tuple[tuple[Sbp, ...], tuple[Sbp, ...]],
    axis_size: int,
    rules: RuleRegistry | None,
) -> list[str]:
    """Return why candidates that share a split with the requested signature are not legal."""
    found = derivation(call, rules)
    wanted = [(index, entry) for index, entry in enumerate(asked[0]) if entry != B] or [
        (index, entry) for index, entry in enumerate(asked[1]) if entry != B
    ]
    side = 0 if any(entry != B for entry in asked[0]) else 1

    def shares(inputs: tuple[Sbp, ...], outputs: tuple[Sbp, ...]) -> bool:
        entries = (inputs, outputs)[side]
        return any(entries[index] == entry for index, entry in wanted)

    reasons = [
        f"{_text(other.inputs, other.outputs)}: {other.reason}"
        for other in found.rejected
        if shares(other.inputs, other.outputs)
    ]
    for part in found.legal:
        failure = next((f for e in part.requires if (f := e.failure(axis_size))), "")
        if failure and shares(part.inputs, part.outputs):
            reasons.append(f"{_text(part.inputs, part.outputs)}: {failure}")
    return sorted(reasons, key=lambda reason: not reason.startswith(f"{_text(*asked)}:"))


def _boxing(
    call: OpCall, signature: Signature, mesh: Placement, axis: int, nearest: Signature1d
) -> str:
    """Return which inputs to box for the nearest legal signature, and the bytes, in words."""
    parts: list[str] = []
    for index, way in _ways(call, signature, mesh, axis, nearest):
        steps = ", ".join(step.kind.value for step in way.steps) or "nothing to do"
        parts.append(
            f"box {call.tensor_names[index]!r} ({way.source[1]}) -> ({way.target[1]}) before it: "
            f"{steps}, {format_bytes(way.bytes)}"
        )
    made = ", ".join(
        f"({sbp.replace(axis, new)})"
        for sbp, new in zip(signature.outputs, nearest.outputs, strict=True)
    )
    parts.append(f"it then gives {made}" if parts else f"let it give {made}, and box that after it")
    return "; ".join(parts)
