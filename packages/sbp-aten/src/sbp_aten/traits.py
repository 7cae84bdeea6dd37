"""What passes ask about ATen's operators beside their rules: copies, casts, factories, extremes.

Stability: internal.
"""

from __future__ import annotations

from sbp_aten.views import VIEWS
from sbp_core.signatures import OperatorTraits

__all__ = ["TRAITS"]

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
    | {"to_host": (0,)},
)
