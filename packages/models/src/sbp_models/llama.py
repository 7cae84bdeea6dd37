# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""Llama: a decoder-only transformer with RMS norms, rotary positions, grouped queries and SwiGLU.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    T time    D hidden    H heads    G heads of keys and values    R H / G
    K width of a head    F width of the MLP    V vocabulary

Parameters are called `embed`, `blocks.N.norm1`, `blocks.N.attention.query`, `.key`, `.value`,
`.output`, `blocks.N.norm2`, `blocks.N.mlp.gate`, `.up`, `.down`, `norm` and `head`, each with
`.weight`; nothing has a bias.

Source: Touvron et al., "Llama 2: open foundation and fine-tuned chat models", 2023, section 2.2;
rotary positions: Su et al., "RoFormer", 2021, section 3.2, with the pairs (k, k + K / 2) as in
`transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import LlamaConfig
from sbp_models.context import too_long

#: Standard deviation of initial weights.
INIT_STD = 0.02


class RmsNorm(nn.Module):
    """Divide by the root of the mean square, and scale."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        square_BT1 = x_BTD.pow(2).mean(dim=-1, keepdim=True)
        return self.weight * (x_BTD * torch.rsqrt(square_BT1 + self.epsilon))


class Rotary(nn.Module):
    """Rotate each pair of dims of a head by an angle that grows with the position."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, context: int, width: int, base: float) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
        angles_TK = torch.cat([angles, angles], dim=1)
        real = torch.get_default_dtype()
        self.register_buffer("cos", angles_TK.cos().to(real), persistent=False)
        self.register_buffer("sin", angles_TK.sin().to(real), persistent=False)

    def forward(self, x_BHTK: torch.Tensor) -> torch.Tensor:
        """Map (B, H, T, K) to (B, H, T, K)."""
        time = x_BHTK.shape[2]
        low, high = x_BHTK.chunk(2, dim=-1)
        turned_BHTK = torch.cat([-high, low], dim=-1)
        return x_BHTK * self.cos[:time] + turned_BHTK * self.sin[:time]


class Attention(nn.Module):
    """Causal grouped-query attention: several heads of queries share a head of keys and values."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads = config.num_heads, config.num_key_heads
        self.width = config.hidden // config.num_heads
        key_width = self.num_key_heads * self.width
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, key_width, bias=False)
        self.value = nn.Linear(config.hidden, key_width, bias=False)
        self.output = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x_BTD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        B, T, D = x_BTD.shape
        q_BHTK = rotary(self.query(x_BTD).view(B, T, self.num_heads, self.width).transpose(1, 2))
        k_BGTK = self.key(x_BTD).view(B, T, self.num_key_heads, self.width).transpose(1, 2)
        v_BGTK = self.value(x_BTD).view(B, T, self.num_key_heads, self.width).transpose(1, 2)
        k_BHTK, v_BHTK = self._repeat(rotary(k_BGTK)), self._repeat(v_BGTK)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        y_BTD: torch.Tensor = self.output(y_BHTK.transpose(1, 2).reshape(B, T, D))
        return y_BTD

    def _repeat(self, x_BGTK: torch.Tensor) -> torch.Tensor:
        """Copy keys or values for every head of queries: (B, H, T, K)."""
        repeats = self.num_heads // self.num_key_heads
        if repeats == 1:
            return x_BGTK
        x_BGRTK = x_BGTK[:, :, None].expand(-1, -1, repeats, -1, -1)
        return x_BGRTK.flatten(1, 2)


class Mlp(nn.Module):
    """SwiGLU: one layer gates another, a third projects back to width D."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y_BTD: torch.Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return y_BTD


class Block(nn.Module):
    """Attention and MLP, each after an RMS norm and around a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = RmsNorm(config.hidden, config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = RmsNorm(config.hidden, config.norm_epsilon)
        self.mlp = Mlp(config)

    def forward(self, x_BTD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), rotary)
        y_BTD: torch.Tensor = x_BTD + self.mlp(self.norm2(x_BTD))
        return y_BTD


class Llama(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.context = config.context
        self.vocabulary = config.vocabulary
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        width = config.hidden // config.num_heads
        self.rotary = Rotary(config.context, width, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden, config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (B, T <= context) to logits (B, T, V).

        Raises:
            SbpValueError: more tokens than `context`.
        """
        if tokens.shape[1] > self.context:
            raise too_long(tokens.shape[1], self.context)
        x_BTD = self.embed(tokens)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.rotary)
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
