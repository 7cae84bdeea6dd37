# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""DLRM: a recommendation model of embedding tables, dot products and two MLPs.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    N numbers    F features    L values of a feature    D width of a row
    V vectors, F + 1    P pairs of vectors

Parameters are called `bottom.0.weight`, `bottom.0.bias`, `bottom.2.weight`, ..., `tables.0.weight`,
..., and `top.0.weight`, ...

Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation
systems", 2019, section 2; the initialisation: its code, `facebookresearch/dlrm`,
`dlrm_s_pytorch.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import DlrmConfig


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    """Return linear layers with a ReLU after each, or after each but the last."""
    layers: list[nn.Module] = []
    for width, out_width in pairwise(widths):
        linear = nn.Linear(width, out_width)
        nn.init.normal_(linear.weight, std=sqrt(2 / (width + out_width)))
        nn.init.normal_(linear.bias, std=sqrt(1 / out_width))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Dlrm(nn.Module):
    """The whole model; see the module docstring."""

    pairs: torch.Tensor

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.bags = config.lookup == "bag"
        width, num_vectors = config.hidden, len(config.rows) + 1
        self.bottom = _mlp((config.num_dense, *config.bottom, width), last_relu=True)
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") if self.bags else nn.Embedding(rows, width)
            for rows in config.rows
        )
        for rows, weight in zip(config.rows, self.tables.parameters(), strict=True):
            nn.init.uniform_(weight, -sqrt(1 / rows), sqrt(1 / rows))
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = _mlp((width + num_pairs, *config.top, 1), last_relu=False)
        # The place of each pair below the diagonal, in the flattened matrix of dot products.
        pairs = [i * num_vectors + j for i in range(num_vectors) for j in range(i)]
        self.register_buffer("pairs", torch.tensor(pairs), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Map numbers (B, N) and values int64 (B, F, L) to logits (B,)."""
        bottom_BD = self.bottom(dense)
        vectors_BVD = torch.stack([bottom_BD, *self._rows(sparse)], dim=1)
        dots_BVV = vectors_BVD @ vectors_BVD.transpose(1, 2)
        pairs_BP = dots_BVV.flatten(1).index_select(1, self.pairs)
        logits_B: torch.Tensor = self.top(torch.cat([bottom_BD, pairs_BP], dim=1)).squeeze(1)
        return logits_B

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean binary cross-entropy of a batch, in nats: a 0-d tensor.

        Args:
            batch: `dense`, floating (B, N); `sparse`, int64 (B, F, L); `clicks`, floating (B,).
        """
        logits_B = self.forward(batch["dense"], batch["sparse"])
        return F.binary_cross_entropy_with_logits(logits_B, batch["clicks"])

    def _rows(self, sparse_BFL: torch.Tensor) -> list[torch.Tensor]:
        """Return the vector of each feature, (B, D): the sum of the rows of its values."""
        if self.bags:
            return [table(sparse_BFL[:, i]) for i, table in enumerate(self.tables)]
        return [table(sparse_BFL[:, i]).sum(dim=1) for i, table in enumerate(self.tables)]
