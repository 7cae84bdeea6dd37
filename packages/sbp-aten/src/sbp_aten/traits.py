"""List the ATen operators that are views, copies or casts, have in-place forms, and so on.

Passes of sbp-aten read `TRAITS` here; sbp-core reads it from the installed sharding rules.
"""

from __future__ import annotations

from sbp_core.graph import Argument, Node
from sbp_core.signatures import OperatorTraits

__all__ = ["ROW_REDUCTIONS", "TRAITS", "VIEWS", "filled_with"]

#: View operators by ATen's schemas, including those that tracing decomposes.
_DECLARED = frozenset(
    {"_conj", "_fw_primal", "_neg_view", "_reshape_alias", "adjoint", "alias", "as_strided"}
    | {"broadcast_to", "chunk", "conj", "contiguous", "detach", "diagonal", "dsplit", "expand"}
    | {"expand_as", "flatten", "hsplit", "imag", "lift_fresh", "linalg_diagonal", "mH", "mT"}
    | {"matrix_H", "moveaxis", "movedim", "narrow", "numpy_T", "permute", "pin_memory"}
    | {"positive", "ravel", "real", "reshape", "reshape_as", "resolve_conj", "resolve_neg"}
    | {"select", "slice", "slice_inverse", "split", "split_with_sizes", "squeeze", "swapaxes"}
    | {"swapdims", "t", "tensor_split", "to", "transpose", "unbind", "unflatten", "unfold"}
    | {"unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "vsplit"}
)

#: Kinds (`view` of `aten.view.default`) of operators whose results may alias their arguments.
#: Schemas of the unsafe ones do not say so.
VIEWS = _DECLARED | {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}

#: Kinds of reductions that may be over the columns of each row, in an update by rows.
ROW_REDUCTIONS = frozenset({"amax", "mean", "sum"})

#: Elementwise operators of which every overload has an in-place form over its first argument.
_ELEMENTWISE = (
    "abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "exp", "lerp",
    "masked_fill", "mul", "neg", "reciprocal", "relu", "rsqrt", "sign", "sqrt", "sub",
)  # fmt: skip

TRAITS = OperatorTraits(
    views=VIEWS,
    casts=frozenset({"_to_copy"}),
    copies=frozenset({"_to_copy", "clone"}),
    joins=frozenset({"cat", "slice_copy", "stack"}),
    factories=frozenset(
        {"arange", "ones_like", "zeros_like", "full", "full_like", "ones", "zeros"}
        | {"random_bernoulli", "random_integers", "random_normal", "random_uniform"}
    ),
    extremes={
        "all": "minimum",
        "amax": "maximum",
        "amin": "minimum",
        "any": "maximum",
        "max": "maximum",
        "min": "minimum",
    },
    elementwise=frozenset({*_ELEMENTWISE, "eq", "ge", "gt", "le", "lt", "ne"}),
    on_shards={
        "aten.view.default": "aten.reshape.default",
        "aten._unsafe_view.default": "aten.reshape.default",
    },
    in_place=dict.fromkeys(_ELEMENTWISE, (0,))
    | {"fused_adagrad": (0, 2), "fused_adam": (0, 2, 3, 4), "fused_sgd": (0, 2)}
    | {"put_rows": (0,), "to_host": (0,)},
)

#: Kinds of factories that fill a tensor with one number -> that number.
_NUMBERS = {"new_ones": 1, "new_zeros": 0, "ones": 1, "ones_like": 1, "zeros": 0, "zeros_like": 0}

#: Kinds of factories with the number as an argument -> its position.
_TOLD = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}


def filled_with(node: Node) -> Argument:
    """Return the number with which a node fills a tensor; None if it does something else."""
    at = _TOLD.get(node.kind, len(node.args))
    return node.args[at] if at < len(node.args) else _NUMBERS.get(node.kind)
