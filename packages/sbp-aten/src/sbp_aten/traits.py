"""What passes ask about ATen's operators beside their rules: copies, casts, factories, extremes.

Stability: internal.
"""

from __future__ import annotations

from sbp_aten.views import VIEWS
from sbp_core.signatures import OperatorTraits

__all__ = ["TRAITS"]

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
    on_shards={
        "aten.view.default": "aten.reshape.default",
        "aten._unsafe_view.default": "aten.reshape.default",
    },
)
