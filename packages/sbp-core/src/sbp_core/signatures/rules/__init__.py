"""The rules of PyTorch's operators and our own, a module for each family."""

from __future__ import annotations

from collections.abc import Mapping

from sbp_core.signatures.rule import Rule
from sbp_core.signatures.rules import (
    attention,
    embedding,
    factories,
    loss,
    matmul,
    normalisation,
    pointwise,
    reductions,
    sbp_ops,
    views,
)

#: Operator name -> rule. Operators that ATen tags as pointwise need none.
RULES: Mapping[str, Rule] = {
    **attention.RULES,
    **embedding.RULES,
    **factories.RULES,
    **loss.RULES,
    **matmul.RULES,
    **normalisation.RULES,
    **pointwise.RULES,
    **reductions.RULES,
    **sbp_ops.RULES,
    **views.RULES,
}
