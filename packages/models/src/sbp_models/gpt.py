# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""GPT: a decoder-only transformer with pre-norm blocks, learned positions and an untied head.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    T time    D hidden    H heads    K width of a head    J 3 K    V vocabulary

Parameters are called `embed.tokens`, `embed.positions`, `blocks.N.norm1`, `blocks.N.attention.qkv`,
`blocks.N.attention.proj`, `blocks.N.norm2`, `blocks.N.mlp.up`, `blocks.N.mlp.down`, `norm` and
`head`, each with `.weight` and, except `embed` and `head`, `.bias`; users pin (fix) their SBP by
these names.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3,
for the block and the initialisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import GptConfig
from sbp_models.context import too_long

#: Standard deviation of initial weights.
INIT_STD = 0.02


class Embedding(nn.Module):
    """Add the embeddings of tokens and of their positions."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.context, config.hidden)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Map int64 (B, T) to floating (B, T, D)."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD: torch.Tensor = self.tokens(tokens_BT) + self.positions(positions_T)
        return x_BTD


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.head_width = config.hidden // config.num_heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # Rows of qkv are ordered head by head, each head's q, k and v together. So splitting the
        # rows of the weight splits the heads, and a shard of the rows has some whole heads.
        qkv_BTJ = self.qkv(x_BTD)
        B, T, rows = qkv_BTJ.shape
        qkv_BTHJ = qkv_BTJ.view(B, T, rows // (3 * self.head_width), 3 * self.head_width)
        q_BHTK, k_BHTK, v_BHTK = qkv_BTHJ.transpose(1, 2).chunk(3, dim=-1)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        y_BTD: torch.Tensor = self.proj(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class Mlp(nn.Module):
    """Two linear layers; the hidden width is four times the outer one."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden)
        self.down = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y_BTD: torch.Tensor = self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
        return y_BTD


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and around a residual connection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        y_BTD: torch.Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class Gpt(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.context = config.context
        self.vocabulary = config.vocabulary
        self.embed = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self._initialise()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (B, T <= context) to logits (B, T, V).

        Raises:
            SbpValueError: more tokens than `context`.
        """
        if tokens.shape[1] > self.context:
            raise too_long(tokens.shape[1], self.context)
        x_BTD = self.embed(tokens)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (B, T <= context) to logits (B, T, V); see `forward`."""
        return self.forward(tokens)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of a batch, in nats: a 0-d tensor.

        Args:
            batch: `tokens` and `targets`, int64 (B, T) each.
        """
        logits_BTV = self.forward(batch["tokens"])
        return F.cross_entropy(logits_BTV.flatten(0, 1), batch["targets"].flatten())

    def _initialise(self) -> None:
        # Every block adds two branches to the residual stream; scaling their last weights keeps
        # the variance of the stream independent of the depth.
        residual_std = INIT_STD / sqrt(2 * len(self.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith(("proj.weight", "down.weight")):
                nn.init.normal_(parameter, std=residual_std)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=INIT_STD)
