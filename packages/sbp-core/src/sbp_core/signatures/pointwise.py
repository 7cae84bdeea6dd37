"""Make the notation of a pointwise operator call, from which its sharding is derived.

The notation is broadcasting, computed from the shapes. The caller names the arguments in which a
pointwise operator is linear or monotone; a rule set does so for its own operators
(`RuleSet.pointwise`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sbp_core.signatures.arguments import labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dependence, Dims, Notation
from sbp_core.signatures.rule import Rule

#: The reason why operators that draw from PyTorch's random streams are not split.
RANDOM_STAYS_WHOLE = "a shard would draw other random numbers; those of sbp.random_* may be split"


def broadcast_dims(shape: Sequence[int], target: Sequence[int]) -> Dims:
    """Return the dims of a tensor that is broadcast to `target`, whose labels are d0, d1, ..."""
    names = list(labels("d", len(target)))[len(target) - len(shape) :]
    extents = target[len(target) - len(shape) :]
    return tuple(
        () if extent == 1 and wide != 1 else (name,)
        for name, extent, wide in zip(names, shape, extents, strict=True)
    )


def broadcasting(call: OpCall, *dependences: Dependence) -> Notation:
    """Return the notation of a pointwise call: `d0 d1, d1 => d0 d1`.

    Args:
        call: The call; if it draws random numbers, it stays whole.
        *dependences: Its linearity and monotony, if it draws none.
    """
    target = call.outputs[0].shape
    random = "seeded" in call.tags
    return Notation(
        inputs=tuple(broadcast_dims(entry.shape, target) for entry in call.inputs),
        outputs=tuple(broadcast_dims(entry.shape, target) for entry in call.outputs),
        dependences=() if random else dependences,
        whole=frozenset(labels("d", len(target))) if random else frozenset(),
        why=RANDOM_STAYS_WHOLE if random else "",
    )


#: The rule of an operator that is tagged as pointwise, if nothing else is known of it.
POINTWISE = Rule(broadcasting)
