"""Rules of grouped products that are not PyTorch's own, verified by execution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sbp_aten.rules import grouped
from sbp_core.sbp import B, P, S, Sbp
from sbp_core.signatures import derive
from sbp_core.signatures.rule_registry import RuleRegistry
from sbp_torch.signatures.verification import call_of
from sbp_torch.testing.signatures import check_rule, sample

_draw = torch.Generator().manual_seed(5)

PRODUCT, GRADIENTS = "sbp_tests.grouped.default", "sbp_tests.grouped_backward.default"

RULES = RuleRegistry({PRODUCT: grouped.PRODUCT, GRADIENTS: grouped.GRADIENTS})


@torch.library.custom_op("sbp_tests::grouped", mutates_args=())
def _grouped(tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    made = tokens.new_zeros(len(tokens), weights.shape[2])
    first = 0
    for expert, last in enumerate(offsets.tolist()):
        made[first:last] = tokens[first:last] @ weights[expert]
        first = last
    return made


@_grouped.register_fake
def _(tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return tokens.new_empty(len(tokens), weights.shape[2])


@torch.library.custom_op("sbp_tests::grouped_backward", mutates_args=())
def _gradients(
    tokens: Tensor, weights: Tensor, offsets: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    of_tokens, of_weights = torch.zeros_like(tokens), torch.zeros_like(weights)
    first = 0
    for expert, last in enumerate(offsets.tolist()):
        of_tokens[first:last] = gradient[first:last] @ weights[expert].T
        of_weights[expert] = tokens[first:last].T @ gradient[first:last]
        first = last
    return of_tokens, of_weights


@_gradients.register_fake
def _(tokens: Tensor, weights: Tensor, offsets: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tokens), torch.empty_like(weights)


def real(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


ENDS = [(3, 3, 11), (0, 0, 11)]


@pytest.mark.slow
def test_grouped_products_of_others_may_be_cut_as_pytorchs_own() -> None:
    for ends in ENDS:
        args = (real(11, 5), real(3, 5, 4), torch.tensor(ends))

        check_rule(PRODUCT, [sample(*args)], rules=RULES)


@pytest.mark.slow
def test_both_gradients_of_a_grouped_product_may_be_cut() -> None:
    for ends in ENDS:
        args = (real(11, 5), real(3, 5, 4), torch.tensor(ends), real(11, 4))

        check_rule(GRADIENTS, [sample(*args)], rules=RULES)


def test_gradients_split_tokens_experts_and_both_widths() -> None:
    args = (real(11, 5), real(3, 5, 4), torch.tensor((3, 3, 11)), real(11, 4))
    call, _ = call_of(GRADIENTS, args, {})
    found: dict[tuple[Sbp, ...], tuple[Sbp, ...]] = {
        entry.inputs: entry.outputs for entry in derive(call, 2, rules=RULES)
    }

    assert found[S(0), B, B, S(0)] == (S(0), P)
    assert found[S(1), S(1), B, B] == (S(1), S(1))
    assert found[B, S(2), B, S(1)] == (P, S(2))
    assert found[B, S(0), B, B] == (P, S(0))
    assert found[B, B, B, P] == (P, P)
