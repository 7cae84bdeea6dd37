"""Rules that say how operators of the library `transformers` can be split over devices.

Its mixtures of experts call these operators where PyTorch's grouped matrix product is not
available, such as while a model is compiled in float32.
"""

from __future__ import annotations

from sbp_aten.rules import GROUPED_MM, GROUPED_MM_GRADIENTS
from sbp_core.signatures import Rule


def product(config: object) -> Rule:
    """Return the rule of `transformers::grouped_mm_fallback(tokens, weights, offsets)`."""
    return GROUPED_MM


def gradients(config: object) -> Rule:
    """Return the rule of `transformers::grouped_mm_fallback_backward` (both gradients)."""
    return GROUPED_MM_GRADIENTS
