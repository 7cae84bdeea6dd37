# ruff: noqa: N803, N806 (names end in the dims of the tensor, see the legend)
"""ResNet: residual networks of 18 to 152 layers, for image classification.

An ordinary `nn.Module` without distributed code. Suffixes name the dims of a tensor:

    B batch    C channels    H height    W width    D features    K classes

Parameters and buffers are called as in torchvision: `conv1`, `bn1`, `layer1.0.conv1`,
`layer1.0.bn1`, ..., `layer2.0.downsample.0`, `layer2.0.downsample.1`, ..., `fc`; the stride of a
bottleneck is at its 3x3 convolution.

Source: He et al., "Deep residual learning for image recognition", CVPR 2016, table 1; the place of
the stride, and the zero-initialised norms: Goyal et al., "Accurate, large minibatch SGD", 2017,
section 5.1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_models.configs import ResnetConfig
from sbp_models.margin import MarginHead

#: Blocks of each stage, by depth.
BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}

#: The smallest depth with bottlenecks.
BOTTLENECK_DEPTH = 50


def _conv3x3(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 3, stride=stride, padding=1, bias=False)


def _conv1x1(channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a residual connection."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, width, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(channels, width, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, H, W) to (B, width, H / stride, W / stride)."""
        y_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = self.bn2(self.conv2(y_BCHW))
        if self.downsample is not None:
            x_BCHW = self.downsample(x_BCHW)
        return F.relu(x_BCHW + y_BCHW)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, around a residual connection."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv1x1(channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv3x3(width, width, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv1x1(width, width * self.expansion)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _downsample(channels, width * self.expansion, stride)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Map (B, channels, H, W) to (B, 4 width, H / stride, W / stride)."""
        y_BCHW = F.relu(self.bn1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.bn2(self.conv2(y_BCHW)))
        y_BCHW = self.bn3(self.conv3(y_BCHW))
        if self.downsample is not None:
            x_BCHW = self.downsample(x_BCHW)
        return F.relu(x_BCHW + y_BCHW)


def _downsample(channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return the projection of the residual connection to the shape of the result, if needed."""
    if stride == 1 and channels == out_channels:
        return None
    return nn.Sequential(_conv1x1(channels, out_channels, stride), nn.BatchNorm2d(out_channels))


class Resnet(nn.Module):
    """The whole model; see the module docstring."""

    def __init__(self, config: ResnetConfig) -> None:
        super().__init__()
        self.label_smoothing = config.label_smoothing
        self.large = config.stem == "large"
        width = config.width
        if self.large:
            self.conv1 = nn.Conv2d(config.channels, width, 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = _conv3x3(config.channels, width)
        self.bn1 = nn.BatchNorm2d(width)
        block = Bottleneck if config.depth >= BOTTLENECK_DEPTH else BasicBlock
        layers, channels = [], width
        for stage, num_blocks in enumerate(BLOCKS[config.depth]):
            stage_width = width * 2**stage
            blocks: list[nn.Module] = []
            for number in range(num_blocks):
                stride = 2 if stage and not number else 1
                blocks.append(block(channels, stage_width, stride))
                channels = stage_width * block.expansion
            layers.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.fc: nn.Module
        if config.head == "margin":
            self.fc = MarginHead(
                channels,
                config.num_classes,
                scale=config.margin_scale,
                margins=config.margins,
                sample_rate=config.sample_rate,
                num_groups=config.sample_groups,
            )
        else:
            self.fc = nn.Linear(channels, config.num_classes)
        self._initialise(zero_init=config.zero_init)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, C, H, W) to logits (B, K)."""
        logits_BK: torch.Tensor = self.fc(self._features(images))
        return logits_BK

    def _features(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (B, C, H, W) to features (B, D), the means over the pixels of the end."""
        x_BCHW = F.relu(self.bn1(self.conv1(images)))
        if self.large:
            x_BCHW = F.max_pool2d(x_BCHW, 3, stride=2, padding=1)
        x_BCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_BCHW))))
        features_BD: torch.Tensor = x_BCHW.mean(dim=(2, 3))
        return features_BD

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of a batch, in nats: a 0-d tensor.

        In training mode the samples are not independent: batch norm uses the whole batch. A margin
        head adds its margins in evaluation, too, where it takes all classes.

        Args:
            batch: `images`, floating (B, C, H, W), and `labels`, int64 (B,).
        """
        images, labels = batch["images"], batch["labels"]
        if isinstance(self.fc, MarginHead):
            logits_BK, labels = self.fc.classify(self._features(images), labels)
        else:
            logits_BK = self.forward(images)
        return F.cross_entropy(logits_BK, labels, label_smoothing=self.label_smoothing)

    def _initialise(self, *, zero_init: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if zero_init and isinstance(module, BasicBlock):
                nn.init.zeros_(module.bn2.weight)
            elif zero_init and isinstance(module, Bottleneck):
                nn.init.zeros_(module.bn3.weight)
