"""Sharding rules of PyTorch's operators and of our own, one module for each family.

    pointwise (and effects: linear or monotone?), foreach          maps of elements
    reductions, scans                                              sums, maxima, orders, counts
    matmul, grouped, linalg                                        products and factorisations
    attention, layers, normalisation, loss                         layers as one operator
    convolution, pooling, folding, resampling                      windows and planes in space
    reshape, rearrange, selection                                  moving elements
    indexing, advanced, embedding_bag                              reading by index
    scatter, replace_view, row_updates                             writing by index, views, masks
    factories, sbp_ops                                             the rest

A rule is a notation (`sbp_core.signatures.notation`), which says what an operator computes and so
how it may be split, and a localiser if needed: a function that adapts a call to a rank's shards.

Modules without rules: `formula` parses notations of any rank; `arrangement`, `windows` and
`sliding` are shared by several families.
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
    "advanced", "attention", "convolution", "embedding_bag", "factories", "folding", "foreach",
    "grouped", "indexing", "layers", "linalg", "loss", "matmul", "normalisation", "pointwise",
    "pooling", "rearrange", "reductions", "replace_view", "resampling", "reshape", "row_updates",
    "sbp_ops", "scans", "scatter", "selection",
)  # fmt: skip

#: Name of a family -> module of its rules.
FAMILIES: Mapping[str, ModuleType] = {
    name: import_module(f"{__name__}.{name}") for name in _FAMILIES
}

#: Operator name -> rule. Operators that ATen tags as pointwise need none.
RULES: Mapping[str, Rule] = {
    op: rule for family in FAMILIES.values() for op, rule in family.RULES.items()
}

#: Rule of `tokens (t, k) x weights (e, k, n)`, rows by group; and of the gradients of both.
GROUPED_MM: Rule = grouped.PRODUCT
GROUPED_MM_GRADIENTS: Rule = grouped.GRADIENTS


def build(config: EmptyConfig) -> RuleSet:
    """Return the rule set. Kind `signature`, names `aten`, `sbp` and `torch_nn`."""
    return RuleSet(rules=RULES, pointwise=pointwise.POINTWISE, traits=TRAITS)
