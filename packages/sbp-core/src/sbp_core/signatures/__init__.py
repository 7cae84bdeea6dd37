"""Signatures: how an operator call may be cut, derived from what the operator means.

`notation` is the language, a `rule` gives the meaning of an operator, `rule_registry` finds the
rule of an operator, `derivations` finds the signatures, `assignment_check` reports illegal
assignments, `localization` gives the call that one rank executes. The rules of ATen's operators are
in `sbp_aten`; `sbp_torch.signatures` verifies rules by execution.
"""

from __future__ import annotations

from typing import Any

from sbp_core.exports import moved_names
from sbp_core.signatures.arguments import (
    KEYWORD_ONLY,
    argument,
    call_key,
    labels,
    tensor_position,
    tensors_as_refs,
    wrap_dim,
    wrap_dims,
)
from sbp_core.signatures.assignment_check import check_signature
from sbp_core.signatures.axes import combine, continuations, enumerate_signatures
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derivations import Derivation, derivation, derive, work_flop
from sbp_core.signatures.explanation import Explanation, explain, explain_call
from sbp_core.signatures.extents import check_shapes
from sbp_core.signatures.library import CallLibrary, call_library
from sbp_core.signatures.localization import localize
from sbp_core.signatures.notation import (
    Dependence,
    Dim,
    Dims,
    Effect,
    Notation,
    decreasing,
    ignored,
    increasing,
    linear,
    maxima,
    minima,
    unread,
)
from sbp_core.signatures.patterns import (
    along,
    batch_notation,
    batched,
    broadcast_shape,
    fresh_dims,
    opaque,
    run_as_is,
    with_literals,
)
from sbp_core.signatures.pointwise import RANDOM_STAYS_WHOLE, broadcast_dims, broadcasting
from sbp_core.signatures.rule import (
    Bounds,
    LocalCall,
    Localizer,
    LocalProgram,
    LocalProgramBuilder,
    OperatorTraits,
    Range,
    Rule,
    RuleSet,
    Shards,
    parse_notation,
    with_local_shape,
)
from sbp_core.signatures.rule_registry import RuleRegistry, UnknownOperator, installed_rules
from sbp_core.signatures.sbp_ops import ordered_after
from sbp_core.signatures.signature import Requirement, Signature1d
from sbp_core.signatures.views import is_view

__all__ = [
    "KEYWORD_ONLY",
    "RANDOM_STAYS_WHOLE",
    "Bounds",
    "CallLibrary",
    "Dependence",
    "Derivation",
    "Dim",
    "Dims",
    "Effect",
    "Explanation",
    "LocalCall",
    "LocalProgram",
    "LocalProgramBuilder",
    "Localizer",
    "Notation",
    "OpCall",
    "OperatorTraits",
    "Range",
    "Requirement",
    "Rule",
    "RuleRegistry",
    "RuleSet",
    "Shards",
    "Signature1d",
    "UnknownOperator",
    "along",
    "argument",
    "batch_notation",
    "batched",
    "broadcast_dims",
    "broadcast_shape",
    "broadcasting",
    "call_key",
    "check_shapes",
    "check_signature",
    "combine",
    "continuations",
    "decreasing",
    "derivation",
    "derive",
    "enumerate_signatures",
    "explain",
    "explain_call",
    "fresh_dims",
    "ignored",
    "increasing",
    "installed_rules",
    "is_view",
    "labels",
    "legal_signatures",
    "linear",
    "localize",
    "maxima",
    "minima",
    "opaque",
    "ordered_after",
    "parse_notation",
    "run_as_is",
    "tensor_position",
    "tensors_as_refs",
    "unread",
    "with_literals",
    "with_local_shape",
    "work_flop",
    "wrap_dim",
    "wrap_dims",
]


def legal_signatures(
    op: str, *args: Any, axis_size: int = 2, rules: RuleRegistry | None = None, **kwargs: Any
) -> tuple[Signature1d, ...]:
    """Return the legal signatures of a call along one mesh axis.

    `legal_signatures("aten.mm.default", x, w)`: nothing is computed, only shapes and dtypes matter.

    Args:
        op: Operator and overload, such as `aten.mm.default`.
        *args: Its arguments. A tensor may be a tensor on any device, a `TensorType`, or a shape
            (which means float32).
        axis_size: Ranks along the mesh axis.
        rules: The rules to use; the installed rules if omitted.
        **kwargs: Its arguments by name.

    Raises:
        SignatureError: the operator has no rule.
        SbpLookupError: there is no such operator, or no tensor library that knows it.
    """
    return derive(call_library().abstract_call(op, args, kwargs), axis_size, rules=rules)


__getattr__ = moved_names(__name__, {"signatures": "sbp_core.signatures.legal_signatures"})
