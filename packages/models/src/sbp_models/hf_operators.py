"""How operators that the library `transformers` defines may be split.

Its mixtures of experts multiply by an operator of its own wherever PyTorch's is not to be had, as
while a model is being compiled in float32.
"""

from __future__ import annotations

from sbp_aten.rules import GROUPED_MM, GROUPED_MM_GRADIENTS
from sbp_core.signatures import Rule


def product(config: object) -> Rule:
    """Return the rule of `transformers::grouped_mm_fallback(tokens, weights, offsets)`."""
    return GROUPED_MM


def gradients(config: object) -> Rule:
    """Return the rule of `transformers::grouped_mm_fallback_backward`, which makes both."""
    return GROUPED_MM_GRADIENTS
