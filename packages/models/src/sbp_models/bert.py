# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""BERT: a transformer encoder with post-norm blocks, trained to predict masked tokens.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    T time    D hidden    H heads    K width of a head    V vocabulary

Parameters are called `embed.tokens`, `embed.positions`, `embed.segments`, `embed.norm`,
`blocks.N.attention.query`, `.key`, `.value`, `.output`, `blocks.N.norm1`, `blocks.N.mlp.up`,
`.down`, `blocks.N.norm2`, `transform`, `norm` and `bias`; the head shares the weight of
`embed.tokens`.

Source: Devlin et al., "BERT: pre-training of deep bidirectional transformers for language
understanding", 2019, section 3; the head: its code, `google-research/bert`, `run_pretraining.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import BertConfig
from sbp_models.context import too_long

#: Standard deviation of initial weights.
INIT_STD = 0.02

#: Epsilon that layer norms add to a variance.
NORM_EPSILON = 1e-12

#: Kinds of segments: the first and the second text of a pair.
NUM_SEGMENTS = 2


class Embedding(nn.Module):
    """Add the embeddings of tokens, of their positions and of their segments."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)
        self.segments = nn.Embedding(NUM_SEGMENTS, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: torch.Tensor, segments_BT: torch.Tensor) -> torch.Tensor:
        """Map int64 (B, T) twice to floating (B, T, D)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.segments(segments_BT) + self.positions(positions_T)
        y_BTD: torch.Tensor = self.drop(self.norm(x_BTD))
        return y_BTD


class Attention(nn.Module):
    """Multi-head self-attention, not causal."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.output = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BTD: torch.Tensor, mask_B11T: torch.Tensor | None) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D); where the mask is False, no token attends."""
        B, T, D = x_BTD.shape
        q_BHTK, k_BHTK, v_BHTK = (
            layer(x_BTD).view(B, T, self.num_heads, D // self.num_heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y_BHTK = F.scaled_dot_product_attention(
            q_BHTK,
            k_BHTK,
            v_BHTK,
            attn_mask=mask_B11T,
            dropout_p=self.dropout if self.training else 0.0,
        )
        y_BTD: torch.Tensor = self.output(y_BHTK.transpose(1, 2).reshape(B, T, D))
        return y_BTD


class Mlp(nn.Module):
    """Two linear layers; the hidden width is four times the outer one."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y_BTD: torch.Tensor = self.down(F.gelu(self.up(x_BTD)))
        return y_BTD


class Block(nn.Module):
    """Attention and MLP, each around a residual connection and before a layer norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.mlp = Mlp(config)
        self.norm2 = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor, mask_B11T: torch.Tensor | None) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = self.norm1(x_BTD + self.drop(self.attention(x_BTD, mask_B11T)))
        y_BTD: torch.Tensor = self.norm2(x_BTD + self.drop(self.mlp(x_BTD)))
        return y_BTD


class Bert(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.context = config.context
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.norm = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor | None = None,
        segments: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map int64 tokens (B, T <= context) to floating logits (B, T, V).

        Args:
            tokens: int64 (B, T).
            mask: bool (B, T), False for padding; none if None.
            segments: int64 (B, T), 0 or 1; all 0 if None.

        Raises:
            SbpValueError: more tokens than `context`.
        """
        if tokens.shape[1] > self.context:
            raise too_long(tokens.shape[1], self.context)
        x_BTD = self.embed(tokens, torch.zeros_like(tokens) if segments is None else segments)
        for block in self.blocks:
            x_BTD = block(x_BTD, None if mask is None else mask[:, None, None])
        x_BTD = self.norm(F.gelu(self.transform(x_BTD)))
        return F.linear(x_BTD, self.embed.tokens.weight, self.bias)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of the tokens with a target, in nats: a 0-d tensor.

        Args:
            batch: `tokens` and `targets`, int64 (B, T) each, the target being -100 for tokens
                without a target; optionally `mask` and `segments`, see `forward`.
        """
        logits_BTV = self.forward(batch["tokens"], batch.get("mask"), batch.get("segments"))
        return F.cross_entropy(logits_BTV.flatten(0, 1), batch["targets"].flatten())
