"""How operators that the library `transformers` defines may be split.

Its mixtures of experts multiply by an operator of its own wherever PyTorch's is not to be had, as
while a model is being compiled in float32. Imports no torch.
"""

from __future__ import annotations

from sbp_aten.rules import grouped
from sbp_core.signatures import Rule


def product(config: object) -> Rule:
    """Return the rule of `transformers::grouped_mm_fallback(tokens, weights, offsets)`."""
    return grouped.PRODUCT


def gradients(config: object) -> Rule:
    """Return the rule of `transformers::grouped_mm_fallback_backward`, which makes both."""
    return grouped.GRADIENTS
