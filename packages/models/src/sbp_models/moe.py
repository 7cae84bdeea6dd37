# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""A mixture of experts like Mixtral: Llama with several MLPs, chosen for each token.

An ordinary `nn.Module` without distributed code. All shapes are static: tokens are multiplied by a
0-1 matrix that assigns them to experts. Suffixes name the dims of a tensor:

    B batch    T time    D hidden    N tokens, B T    E experts    P picks of a token
    C places of an expert    F width of an expert    V vocabulary

Parameters are called as in `sbp_models.llama`, with `blocks.N.experts.router.weight` and
`blocks.N.experts.gate`, `.up` and `.down` (E, out, in) in place of `blocks.N.mlp`.

Source: Jiang et al., "Mixtral of experts", 2024, section 2.1; places and dropped tokens: Lepikhin
et al., "GShard", 2021, algorithm 1; the load-balancing loss: Fedus et al., "Switch transformers",
2022, section 2.2, over all blocks at once as in `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import MoeConfig
from sbp_models.context import too_long
from sbp_models.llama import INIT_STD, Attention, RmsNorm, Rotary


class Experts(nn.Module):
    """Several SwiGLU MLPs, and a router that weights them for every token."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        E, D, F_ = config.num_experts, config.hidden, config.mlp_hidden
        self.num_experts, self.top_k, self.capacity = E, config.top_k, config.capacity
        self.router = nn.Linear(D, E, bias=False)
        self.gate = nn.Parameter(torch.empty(E, F_, D))
        self.up = nn.Parameter(torch.empty(E, F_, D))
        self.down = nn.Parameter(torch.empty(E, D, F_))

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map (B, T, D) to (B, T, D), and return the routing of the tokens.

        Returns:
            The result; the router's probability of each expert (N, E); whether an expert was
            picked, 0 or 1 (N, E).
        """
        x_ND = x_BTD.flatten(0, 1)
        chances_NE = self.router(x_ND).softmax(dim=-1)
        picks_NP = chances_NE.topk(self.top_k, dim=-1).indices
        experts_E = torch.arange(self.num_experts, device=x_BTD.device)
        picked_NPE = (picks_NP[:, :, None] == experts_E).to(x_BTD.dtype)
        picked_NE = picked_NPE.sum(dim=1)
        weights_NE = chances_NE * picked_NE
        weights_NE = weights_NE / weights_NE.sum(dim=-1, keepdim=True)
        y_ND = (
            self._dispatched(x_ND, weights_NE, picked_NE)
            if self.capacity
            else self._all(x_ND, weights_NE)
        )
        return y_ND.view(x_BTD.shape), chances_NE, picked_NE

    def _all(self, x_ND: torch.Tensor, weights_NE: torch.Tensor) -> torch.Tensor:
        """Let every expert compute every token: (N, D)."""
        N = x_ND.shape[0]
        y_END = self._compute(x_ND.expand(self.num_experts, N, -1))
        return torch.einsum("end,ne->nd", y_END, weights_NE)

    def _dispatched(
        self, x_ND: torch.Tensor, weights_NE: torch.Tensor, picked_NE: torch.Tensor
    ) -> torch.Tensor:
        """Let every expert compute the first tokens that picked it, up to its capacity.

        A token without a place in an expert gets nothing from it.
        """
        N = x_ND.shape[0]
        C = min(N, math.ceil(self.capacity * self.top_k * N / self.num_experts))
        # The place of each token in each expert: 0 for the first that picked it.
        places_NE = picked_NE.to(torch.int64).cumsum(dim=0) - 1
        numbers_C = torch.arange(C, device=x_ND.device)
        placed_NEC = (places_NE[:, :, None] == numbers_C).to(x_ND.dtype) * picked_NE[:, :, None]
        y_ECD = self._compute(torch.einsum("nec,nd->ecd", placed_NEC, x_ND))
        return torch.einsum("nec,ecd->nd", placed_NEC * weights_NE[:, :, None], y_ECD)

    def _compute(self, x_ECD: torch.Tensor) -> torch.Tensor:
        """Give each expert its own tokens: (E, C, D) to (E, C, D)."""
        gate_ECF = F.silu(torch.bmm(x_ECD, self.gate.transpose(1, 2)))
        return torch.bmm(
            gate_ECF * torch.bmm(x_ECD, self.up.transpose(1, 2)), self.down.transpose(1, 2)
        )


class Block(nn.Module):
    """Attention and experts, each after an RMS norm and around a residual connection."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.norm1 = RmsNorm(config.hidden, config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = RmsNorm(config.hidden, config.norm_epsilon)
        self.experts = Experts(config)

    def forward(
        self, x_BTD: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map (B, T, D) to (B, T, D), and return the routing, as `Experts.forward`."""
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), rotary)
        y_BTD, chances_NE, picked_NE = self.experts(self.norm2(x_BTD))
        return x_BTD + y_BTD, chances_NE, picked_NE


class Moe(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.context = config.context
        self.vocabulary = config.vocabulary
        self.balance = config.balance
        self.embed = nn.Embedding(config.vocabulary, config.hidden)
        width = config.hidden // config.num_heads
        self.rotary = Rotary(config.context, width, config.rope_base)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden, config.norm_epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map int64 tokens (B, T <= context) to logits (B, T, V) and the load-balancing loss.

        Raises:
            SbpValueError: more tokens than `context`.
        """
        if tokens.shape[1] > self.context:
            raise too_long(tokens.shape[1], self.context)
        x_BTD = self.embed(tokens)
        chances, picked = [], []
        for block in self.blocks:
            x_BTD, chances_NE, picked_NE = block(x_BTD, self.rotary)
            chances.append(chances_NE)
            picked.append(picked_NE)
        logits_BTV: torch.Tensor = self.head(self.norm(x_BTD))
        return logits_BTV, balance_loss(torch.cat(chances), torch.cat(picked))

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (B, T <= context) to logits (B, T, V); see `forward`."""
        return self.forward(tokens)[0]

    def losses(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return 0-d tensors: the `loss`, and its terms `cross_entropy` and `balance`.

        `balance` is 1 for every pick if all experts are picked equally often, else more.

        Args:
            batch: `tokens` and `targets`, int64 (B, T) each.
        """
        logits_BTV, balance = self.forward(batch["tokens"])
        cross_entropy = F.cross_entropy(logits_BTV.flatten(0, 1), batch["targets"].flatten())
        loss = cross_entropy + self.balance * balance
        return {"loss": loss, "cross_entropy": cross_entropy, "balance": balance}

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss alone; see `losses`."""
        return self.losses(batch)["loss"]


def balance_loss(chances_NE: torch.Tensor, picked_NE: torch.Tensor) -> torch.Tensor:
    """Return the load-balancing loss: 0-d, top_k if all experts are picked equally often.

    Args:
        chances_NE: The router's probability of each expert.
        picked_NE: Whether an expert was picked: 0 or 1.
    """
    share_E = picked_NE.mean(dim=0)
    return (share_E * chances_NE.mean(dim=0)).sum() * chances_NE.shape[1]
