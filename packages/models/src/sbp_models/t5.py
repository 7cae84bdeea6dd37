# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""T5: an encoder-decoder transformer with relative positions and one shared embedding.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    T time    S time of the source    D hidden    H heads    K width of a head
    V vocabulary

Parameters are called `embed` (also the head's weight), and in `encoder` and `decoder`: `bias`,
`blocks.N.norm1`, `blocks.N.attention.query`, `.key`, `.value`, `.output`, `blocks.N.norm2`,
`blocks.N.cross` (in the decoder, with its `norm3`), `blocks.N.mlp.up`, `.down` and `norm`, each
with `.weight`; only the scores of attention have an additive bias.

Source: Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
transformer", 2020, section 2.1; buckets and initialisation: its code, `tensorflow/mesh`,
`mesh_tensorflow/transformer/transformer_layers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import T5Config
from sbp_models.llama import RmsNorm


class RelativeBias(nn.Module):
    """Bias of the attention scores of each head: a number for each bucket of distances."""

    def __init__(self, config: T5Config, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.num_buckets, self.max_distance = config.num_buckets, config.max_distance
        self.weight = nn.Parameter(torch.empty(config.num_buckets, config.num_heads))

    def forward(self, time: int) -> torch.Tensor:
        """Return the bias of the scores (H, T, T); -inf for later positions, if causal."""
        positions_T = torch.arange(time, device=self.weight.device)
        distances_TT = positions_T - positions_T[:, None]
        bias_TTH = F.embedding(self._buckets(distances_TT), self.weight)
        bias_HTT = bias_TTH.permute(2, 0, 1)
        if self.causal:
            bias_HTT = bias_HTT.masked_fill(distances_TT > 0, -math.inf)
        return bias_HTT

    def _buckets(self, distances_TT: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each distance: one each if near, logarithmically wider if far."""
        if self.causal:
            number, far_TT = self.num_buckets, (-distances_TT).clamp(min=0)
            first_TT = torch.zeros_like(distances_TT)
        else:
            number, far_TT = self.num_buckets // 2, distances_TT.abs()
            first_TT = (distances_TT > 0).to(torch.int64) * number
        exact = number // 2
        # Always in float32: the weights are trained for these edges of the buckets.
        part_TT = torch.log(far_TT.clamp(min=1).float() / exact) / math.log(
            self.max_distance / exact
        )
        wide_TT = (exact + (part_TT * (number - exact)).to(torch.int64)).clamp(max=number - 1)
        return first_TT + torch.where(far_TT < exact, far_TT, wide_TT)


class Attention(nn.Module):
    """Multi-head attention with unscaled scores."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.num_heads, self.width = config.num_heads, config.head_width
        inner = config.num_heads * config.head_width
        self.query = nn.Linear(config.hidden, inner, bias=False)
        self.key = nn.Linear(config.hidden, inner, bias=False)
        self.value = nn.Linear(config.hidden, inner, bias=False)
        self.output = nn.Linear(inner, config.hidden, bias=False)

    def forward(
        self, x_BTD: torch.Tensor, source_BSD: torch.Tensor, bias_HTS: torch.Tensor | None
    ) -> torch.Tensor:
        """Map (B, T, D), which attend to (B, S, D), to (B, T, D)."""
        q_BHTK = self._heads(self.query(x_BTD))
        k_BHSK = self._heads(self.key(source_BSD))
        v_BHSK = self._heads(self.value(source_BSD))
        scores_BHTS = q_BHTK @ k_BHSK.transpose(2, 3)
        if bias_HTS is not None:
            scores_BHTS = scores_BHTS + bias_HTS
        y_BHTK = scores_BHTS.softmax(dim=-1) @ v_BHSK
        y_BTD: torch.Tensor = self.output(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.width).transpose(1, 2)


class Mlp(nn.Module):
    """Two layers with a ReLU between."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y_BTD: torch.Tensor = self.down(F.relu(self.up(x_BTD)))
        return y_BTD


class Block(nn.Module):
    """Self-attention, cross-attention (in the decoder) and MLP, each after a norm."""

    def __init__(self, config: T5Config, *, decoder: bool) -> None:
        super().__init__()
        self.norm1 = RmsNorm(config.hidden, config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = RmsNorm(config.hidden, config.norm_epsilon)
        self.mlp = Mlp(config)
        self.norm3 = RmsNorm(config.hidden, config.norm_epsilon) if decoder else None
        self.cross = Attention(config) if decoder else None

    def forward(
        self, x_BTD: torch.Tensor, bias_HTT: torch.Tensor, source_BSD: torch.Tensor | None
    ) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        normed_BTD = self.norm1(x_BTD)
        x_BTD = x_BTD + self.attention(normed_BTD, normed_BTD, bias_HTT)
        if self.cross is not None and self.norm3 is not None:
            x_BTD = x_BTD + self.cross(self.norm3(x_BTD), source_BSD, None)
        y_BTD: torch.Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class Stack(nn.Module):
    """The blocks of the encoder, or of the decoder, which share one bias."""

    def __init__(self, config: T5Config, *, decoder: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(config, causal=decoder)
        self.blocks = nn.ModuleList(
            Block(config, decoder=decoder) for _ in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden, config.norm_epsilon)

    def forward(self, x_BTD: torch.Tensor, source_BSD: torch.Tensor | None = None) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        bias_HTT = self.bias(x_BTD.shape[1])
        for block in self.blocks:
            x_BTD = block(x_BTD, bias_HTT, source_BSD)
        y_BTD: torch.Tensor = self.norm(x_BTD)
        return y_BTD


class T5(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.start = config.start
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        self.encoder = Stack(config, decoder=False)
        self.decoder = Stack(config, decoder=True)
        self._initialise(config)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (B, S) and shifted targets (B, T) to logits (B, T, V)."""
        source_BSD = self.encoder(self.embed(tokens))
        x_BTD = self.decoder(self.embed(before), source_BSD)
        # The embedding has variance 1, which is too much for the weight of a linear layer.
        return F.linear(x_BTD * x_BTD.shape[2] ** -0.5, self.embed.weight)

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of the targets, in nats: a 0-d tensor.

        Args:
            batch: `tokens`, int64 (B, S), and `targets`, int64 (B, T).
        """
        targets_BT = batch["targets"]
        # The decoder sees each target when it predicts the next one.
        before_BT = F.pad(targets_BT[:, :-1], (1, 0), value=self.start)
        logits_BTV = self.forward(batch["tokens"], before_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def _initialise(self, config: T5Config) -> None:
        nn.init.normal_(self.embed.weight)
        for module in self.modules():
            if isinstance(module, RelativeBias):
                nn.init.normal_(module.weight, std=config.hidden**-0.5)
            elif isinstance(module, Attention):
                # A small init of the queries replaces the scaling of scores.
                nn.init.normal_(module.query.weight, std=(config.hidden * module.width) ** -0.5)
                nn.init.normal_(module.key.weight, std=config.hidden**-0.5)
                nn.init.normal_(module.value.weight, std=config.hidden**-0.5)
                nn.init.normal_(module.output.weight, std=module.output.in_features**-0.5)
            elif isinstance(module, Mlp):
                nn.init.normal_(module.up.weight, std=config.hidden**-0.5)
                nn.init.normal_(module.down.weight, std=config.mlp_hidden**-0.5)
