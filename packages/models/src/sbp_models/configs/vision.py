"""Settings of the image classifiers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sbp_core.errors import ConfigError
from sbp_models.configs.checks import check_divides, check_fractions, check_positive
from sbp_models.configs.compatibility import check_images


@dataclass(frozen=True, slots=True, kw_only=True)
class ResnetConfig:
    """Settings of `sbp_models.resnet.Resnet`; the defaults make 0.7 million parameters.

    `depth=50 width=64 stem=large num_classes=1000` is the published ResNet-50.

    Args:
        depth: Number of layers with weights.
        width: Channels after the stem; the four stages have 1, 2, 4 and 8 times as many.
        stem: `large`: 7x7 at stride 2 and a max pool, for images of about 224x224; `small`: 3x3 at
            stride 1, for images of about 32x32.
        channels: Channels of an image.
        num_classes: Number of classes.
        label_smoothing: Fraction of the target that is spread over all classes, in [0, 1).
        zero_init: Initialise every block as the identity: its last norm has weight 0.
        head: `linear`: a linear layer; `margin`: cosines with margins for targets, as in ArcFace
            and CosFace, see `sbp_models.margin`.
        margins: m1, m2 (radians) and m3 of `head=margin`: the cosine of the target's angle a
            becomes cos(m1 a + m2) - m3.
        margin_scale: Factor of the cosines of `head=margin`.
        sample_rate: Fraction of the classes on which a step of `head=margin` trains, in (0, 1]:
            those of the batch, and others at random, see `sbp_models.margin.sample_classes`.
        sample_groups: Groups of consecutive classes, each of which samples equally many; divides
            `num_classes` if `sample_rate` < 1. A mesh axis splits the classes if its size divides
            the number of groups.

    Raises:
        ConfigError: a size or factor is not positive, `label_smoothing` is no fraction, or no
            classes can be sampled so.
    """

    depth: Literal[18, 34, 50, 101, 152] = 18
    width: int = 16
    stem: Literal["large", "small"] = "small"
    channels: int = 3
    num_classes: int = 10
    label_smoothing: float = 0.0
    zero_init: bool = True
    head: Literal["linear", "margin"] = "linear"
    margins: tuple[float, float, float] = (1.0, 0.5, 0.0)
    margin_scale: float = 64.0
    sample_rate: float = 1.0
    sample_groups: int = 8

    def __post_init__(self) -> None:
        check_positive(self, "width", "channels", "num_classes", "sample_groups")
        check_fractions(self, "label_smoothing")
        m1, m2, m3 = self.margins
        if not (0 < m1 < math.inf and 0 <= m2 < math.pi and 0 <= m3 < math.inf):
            raise ConfigError(
                f"margins={list(self.margins)} has a margin out of range",
                accepted="[m1, m2, m3] with m1 > 0, 0 <= m2 < pi and m3 >= 0",
                todo="take those of ArcFace, [1, 0.5, 0], or of CosFace, [1, 0, 0.35]",
            )
        if not 0 < self.margin_scale < math.inf:
            raise ConfigError(
                f"margin_scale={self.margin_scale} is no scale", accepted="a number > 0"
            )
        if self.sample_rate != 1:
            self._check_sample()

    def _check_sample(self) -> None:
        if not 0 < self.sample_rate < 1:
            raise ConfigError(
                f"sample_rate={self.sample_rate} is no fraction", accepted="a number in (0, 1]"
            )
        if self.head != "margin":
            raise ConfigError(
                f"sample_rate={self.sample_rate} has no effect on head={self.head}",
                accepted="head=margin, or sample_rate=1",
            )
        check_divides(self, "sample_groups", "num_classes")
        size = self.num_classes // self.sample_groups
        if not round(self.sample_rate * size):
            raise ConfigError(
                f"sample_rate={self.sample_rate} of the {size} classes of a group is none",
                accepted=f"at least {1 / size:.2g}",
                todo="raise sample_rate, or lower sample_groups",
            )

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_images(
            others.get("data"), model="resnet", channels=self.channels, num_classes=self.num_classes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VitConfig:
    """Settings of `sbp_models.vit.Vit`; the defaults make 0.8 million parameters.

    `image_size=224 patch_size=16 num_classes=1000 hidden=768 num_layers=12 num_heads=12` is the
    published ViT-B/16.

    Args:
        image_size: Height and width of an image, in pixels.
        patch_size: Height and width of a patch, in pixels; divides `image_size`.
        channels: Channels of an image.
        num_classes: Number of classes.
        num_layers: Number of blocks.
        num_heads: Attention heads of a block; divides `hidden`.
        hidden: Width of the residual stream.
        mlp_ratio: Width of the MLP's hidden layer, as a multiple of `hidden`.
        fused_qkv: One layer makes queries, keys and values, as in timm; otherwise three do, whose
            rows split by heads.
        dropout: Probability with which a number is dropped after a layer, in [0, 1).
        drop_path: Probability with which a sample skips the last block, in [0, 1); it grows
            linearly from 0 at the first.
        label_smoothing: Fraction of the target that is spread over all classes, in [0, 1).

    Raises:
        ConfigError: a size is not positive or does not divide another, or a probability is no
            fraction.
    """

    image_size: int = 32
    patch_size: int = 4
    channels: int = 3
    num_classes: int = 10
    num_layers: int = 4
    num_heads: int = 4
    hidden: int = 128
    mlp_ratio: int = 4
    fused_qkv: bool = True
    dropout: float = 0.0
    drop_path: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "image_size", "patch_size", "channels", "num_classes")
        check_positive(self, "num_layers", "num_heads", "hidden", "mlp_ratio")
        check_divides(self, "patch_size", "image_size")
        check_divides(self, "num_heads", "hidden")
        check_fractions(self, "dropout", "drop_path", "label_smoothing")

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_images(
            others.get("data"),
            model="vit",
            channels=self.channels,
            num_classes=self.num_classes,
            image_size=self.image_size,
        )
