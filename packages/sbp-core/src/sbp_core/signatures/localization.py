"""Convert an operator call on whole tensors to the calls that one rank executes on its shards.

The compiler calls `localize` for the operators of a plan. Most operators run unchanged on their
shards; if some arguments have to change, the localiser of the operator's rule changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.graph.ir import TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Split, local_bounds
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.rule import Bounds, LocalCall, LocalProgram, Shards
from sbp_core.signatures.rule_registry import RuleRegistry, installed_rules
from sbp_core.strategy import Signature


def localize(
    call: OpCall,
    signature: Signature,
    mesh: Placement,
    rank: int,
    *,
    rules: RuleRegistry | None = None,
) -> LocalProgram:
    """Return the program that `rank` executes for its part of a call.

    Args:
        call: The call on logical tensors.
        signature: A legal signature; see `check_signature`.
        mesh: The mesh that the call runs on.
        rank: One of its ranks.
        rules: The rules to use; the installed rules if omitted.

    Raises:
        SbpValueError: the signature does not fit the shapes and the mesh, or the mesh has no such
            rank.
        SignatureError: the operator has no rule.
    """
    localizer = (rules or installed_rules()).rule(call).localize
    if localizer is None:
        return LocalProgram(calls=(LocalCall(op=call.op, args=call.args, kwargs=call.kwargs),))
    coordinate = mesh.coordinate(rank)

    def bounds(types: Sequence[TensorType], sbps: Sequence[NdSbp]) -> tuple[Bounds, ...]:
        return tuple(
            local_bounds(entry.shape, sbp, mesh.mesh_shape, coordinate)
            for entry, sbp in zip(types, sbps, strict=True)
        )

    shards = Shards(
        inputs=bounds(call.inputs, signature.inputs),
        outputs=bounds(call.outputs, signature.outputs),
    )
    made = localizer(call, shards)
    return made if isinstance(made, LocalProgram) else LocalProgram(calls=(made,))


def varying_axes(
    call: OpCall, signature: Signature, *, rules: RuleRegistry | None = None
) -> tuple[int, ...]:
    """Return the mesh axes along which ranks may execute different programs for a call.

    Ranks whose coordinates differ on other axes only execute the same program: `localize` depends
    on a rank through its slices alone.

    Args:
        call: See `localize`, as for the other arguments.
        signature: How it is cut.
        rules: The rules to use.

    Raises:
        SignatureError: the operator has no rule.
    """
    if (rules or installed_rules()).rule(call).localize is None:
        return ()
    sbps = (*signature.inputs, *signature.outputs)
    cut = {axis for sbp in sbps for axis, entry in enumerate(sbp) if isinstance(entry, Split)}
    return tuple(sorted(cut))
