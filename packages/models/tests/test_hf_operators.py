"""What `transformers` brings of its own can be planned: its operators, cut as our rules say."""

import importlib

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import HfConfig
from sbp_models.hf import build
from sbp_torch.graph_capture import capture
from sbp_torch.testing.signatures import check_rule, sample

PRODUCT = "transformers.grouped_mm_fallback.default"
GRADIENTS = "transformers.grouped_mm_fallback_backward.default"

_draw = torch.Generator().manual_seed(3)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


@pytest.fixture(autouse=True)
def moe() -> None:
    pytest.importorskip("transformers")
    importlib.import_module("transformers.integrations.moe")  # registers the operators


def test_grouped_products_of_transformers_may_be_cut() -> None:
    tokens, weights, ends = real(7, 3), real(3, 3, 5), torch.tensor((2, 2, 7))

    check_rule(PRODUCT, [sample(tokens, weights, ends)], axis_sizes=(2,))
    check_rule(GRADIENTS, [sample(tokens, weights, ends, real(7, 5))], axis_sizes=(2,))


def test_a_mixture_that_is_asked_for_grouped_products_is_captured_with_them() -> None:
    overrides = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "shared_expert_intermediate_size": 4,
        "decoder_sparse_step": 1,
    }
    made = build(HfConfig(kind="qwen2_moe", context=4, overrides=overrides, experts="grouped_mm"))
    tokens = torch.zeros(2, 4, dtype=torch.int64)

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model.logits(batch["tokens"]).flatten(0, 1), tokens.flatten())

    graph = capture(made, loss, {"tokens": tokens}, torch.optim.SGD(made.parameters()))

    assert {node.kind for node in graph.nodes} & {"grouped_mm_fallback", "_grouped_mm"}
