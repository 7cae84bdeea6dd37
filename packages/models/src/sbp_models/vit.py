# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""ViT: a vision transformer with patches, a class token, learned positions and pre-norm blocks.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    P patches    T tokens, P + 1    D hidden    H heads    K width of a head
    C channels of the image

Parameters are called, and the rows of `qkv` ordered, as in timm: `cls_token`, `pos_embed`,
`patch_embed.proj`, `blocks.N.norm1`, `blocks.N.attn.qkv` (or, not in timm, `.q`, `.k`, `.v`),
`blocks.N.attn.proj`, `blocks.N.norm2`, `blocks.N.mlp.fc1`, `blocks.N.mlp.fc2`, `norm` and `head`.

Source: Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, section 3.1; drop path:
Huang et al., "Deep networks with stochastic depth", ECCV 2016; names: timm,
`timm/models/vision_transformer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_core.errors import SbpValueError
from sbp_models.configs import VitConfig

#: Standard deviation of initial weights.
INIT_STD = 0.02

#: Epsilon that layer norms add to a variance.
NORM_EPSILON = 1e-6


class PatchEmbedding(nn.Module):
    """Cut an image into patches and project each."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = nn.Conv2d(config.channels, config.hidden, size, stride=size)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Map images (B, C, height, width) to (B, P, D), row by row."""
        x_BPD: torch.Tensor = self.proj(images_BCHW).flatten(2).transpose(1, 2)
        return x_BPD


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        else:
            self.q = nn.Linear(config.hidden, config.hidden)
            self.k = nn.Linear(config.hidden, config.hidden)
            self.v = nn.Linear(config.hidden, config.hidden)
        self.proj = nn.Linear(config.hidden, config.hidden)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        B, T, D = x_BTD.shape
        H, K = self.num_heads, D // self.num_heads
        if self.fused:
            qkv_3BHTK = self.qkv(x_BTD).reshape(B, T, 3, H, K).permute(2, 0, 3, 1, 4)
            q_BHTK, k_BHTK, v_BHTK = qkv_3BHTK.unbind(0)
        else:
            q_BHTK, k_BHTK, v_BHTK = (
                layer(x_BTD).view(B, T, H, K).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK)
        y_BTD: torch.Tensor = self.drop(self.proj(y_BHTK.transpose(1, 2).reshape(B, T, D)))
        return y_BTD


class Mlp(nn.Module):
    """Two layers with a GELU between."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden, config.mlp_ratio * config.hidden)
        self.fc2 = nn.Linear(config.mlp_ratio * config.hidden, config.hidden)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y_BTD: torch.Tensor = self.drop(self.fc2(self.drop(F.gelu(self.fc1(x_BTD)))))
        return y_BTD


class DropPath(nn.Module):
    """Drop the residual branch of some samples, and scale the branch of the other samples."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        if self.probability == 0 or not self.training:
            return x_BTD
        keep = 1 - self.probability
        kept_B11 = x_BTD.new_empty(x_BTD.shape[0], 1, 1).bernoulli_(keep)
        return x_BTD * kept_B11 / keep


class Block(nn.Module):
    """Attention and MLP, each after a layer norm and around a residual connection."""

    def __init__(self, config: VitConfig, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.mlp = Mlp(config)
        self.drop_path = DropPath(drop_path)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.drop_path(self.attn(self.norm1(x_BTD)))
        y_BTD: torch.Tensor = x_BTD + self.drop_path(self.mlp(self.norm2(x_BTD)))
        return y_BTD


class Vit(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.image_size = config.image_size
        self.label_smoothing = config.label_smoothing
        num_patches = (config.image_size // config.patch_size) ** 2
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.hidden))
        self.pos_embed = nn.Parameter(torch.empty(1, num_patches + 1, config.hidden))
        self.patch_embed = PatchEmbedding(config)
        self.pos_drop = nn.Dropout(config.dropout)
        last = max(config.num_layers - 1, 1)
        self.blocks = nn.ModuleList(
            Block(config, config.drop_path * number / last) for number in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden, eps=NORM_EPSILON)
        self.head = nn.Linear(config.hidden, config.num_classes)
        self._initialise()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, C, image_size, image_size) to logits (B, classes).

        Raises:
            SbpValueError: the images have another size.
        """
        if images.shape[2:] != (self.image_size, self.image_size):
            raise SbpValueError(
                f"images of {images.shape[2]} x {images.shape[3]} do not have the positions of "
                f"{self.image_size} x {self.image_size} that the model has learned",
                accepted=f"images of shape (batch, channels, {self.image_size}, {self.image_size})",
                todo="make model.image_size and data.image_size equal",
            )
        x_BPD = self.patch_embed(images)
        first_B1D = self.cls_token.expand(x_BPD.shape[0], -1, -1)
        x_BTD = self.pos_drop(torch.cat([first_B1D, x_BPD], dim=1) + self.pos_embed)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: torch.Tensor = self.head(self.norm(x_BTD)[:, 0])
        return logits

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of a batch, in nats: a 0-d tensor.

        Args:
            batch: `images`, floating (B, C, image_size, image_size), and `labels`, int64 (B,).
        """
        logits = self.forward(batch["images"])
        return F.cross_entropy(logits, batch["labels"], label_smoothing=self.label_smoothing)

    def _initialise(self) -> None:
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=INIT_STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)
