"""The rules of PyTorch's operators and our own, a module for each family.

    pointwise (in what monotone: effects), elementwise             maps of elements
    reductions, scans, histograms, distance                        sums, maxima, orders, counts
    matmul, grouped, linalg, fft                                   products and factorisations
    attention (its calls: attention_call), recurrent, layers       layers as one operator
    normalisation, batch_norm, loss, nll, ctc                      softmax, norms, losses
    convolution, pooling, folding, padding, resampling             windows and planes in space
    reshape, views, rearrange, selection, triangular, memory       where elements stand
    indexing, advanced, embedding, embedding_bag                   reading by index
    scatter, index_put, replace_view, data_dependent               writing by index, masks
    factories, random, foreach, fused, sbp_ops                     all else

Without rules of their own: `arrangement`, `windows`, `updates`, `means`, `sliding` and `planes`
hold what several families share.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType

from sbp_aten.rules import grouped, pointwise
from sbp_aten.traits import TRAITS
from sbp_core.plugins import EmptyConfig
from sbp_core.signatures import Rule, RuleSet

__all__ = ["FAMILIES", "GROUPED_MM", "GROUPED_MM_GRADIENTS", "RULES"]

_FAMILIES = (
    "advanced", "attention", "batch_norm", "convolution", "ctc", "data_dependent", "distance",
    "elementwise", "embedding", "embedding_bag", "factories", "fft", "folding", "foreach",
    "fused", "grouped", "histograms", "index_put", "indexing", "layers", "linalg", "loss",
    "matmul", "memory", "nll", "normalisation", "padding", "pointwise", "pooling", "random",
    "rearrange", "recurrent", "reductions", "replace_view", "resampling", "reshape", "sbp_ops",
    "scans", "scatter", "selection", "triangular", "views",
)  # fmt: skip

#: Name -> module of the rules of a family, whose docstring says what they have in common.
FAMILIES: Mapping[str, ModuleType] = {
    name: import_module(f"{__name__}.{name}") for name in _FAMILIES
}

#: Operator name -> rule. Operators that ATen tags as pointwise need none.
RULES: Mapping[str, Rule] = {
    op: rule for family in FAMILIES.values() for op, rule in family.RULES.items()
}

#: Of `tokens (t, k) x weights (e, k, n)`, rows by group; and of the gradients of both.
GROUPED_MM: Rule = grouped.PRODUCT
GROUPED_MM_GRADIENTS: Rule = grouped.GRADIENTS


def build(config: EmptyConfig) -> RuleSet:
    """Return the rule set. Kind `signature`, names `aten`, `sbp` and `torch_nn`."""
    return RuleSet(rules=RULES, pointwise=pointwise.POINTWISE, traits=TRAITS)
