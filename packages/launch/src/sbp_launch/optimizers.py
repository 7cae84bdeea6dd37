"""The optimizers that come with sbp-launch: settings, and makers of `torch.optim` optimizers.

Torch is imported when an optimizer is built, so that settings are checked without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from sbp_core.plugins.kinds import OptimizerFactory


def _check_range(name: str, value: float, low: float, below: float, accepted: str) -> None:
    # Written so that NaN, which compares as false with everything, is refused.
    if not low <= value < below:
        raise ConfigError(f"{name}={value!r} is out of range", accepted=accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Settings of `torch.optim.AdamW`.

    Args:
        lr: Learning rate, > 0.
        betas: Decay of the mean and of the mean square, each in [0, 1).
        eps: Added to the root of the mean square, > 0.
        weight_decay: Decoupled weight decay, >= 0.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _check_range("lr", self.lr, 5e-324, float("inf"), "a finite number > 0")
        for beta in self.betas:
            _check_range("betas", beta, 0.0, 1.0, "two numbers in [0, 1)")
        _check_range("eps", self.eps, 5e-324, float("inf"), "a finite number > 0")
        _check_range("weight_decay", self.weight_decay, 0.0, float("inf"), "a finite number >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdConfig:
    """Settings of `torch.optim.SGD`.

    Args:
        lr: Learning rate, > 0.
        momentum: Decay of the velocity, in [0, 1); 0 keeps none.
        weight_decay: Weight decay, >= 0.
    """

    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_range("lr", self.lr, 5e-324, float("inf"), "a finite number > 0")
        _check_range("momentum", self.momentum, 0.0, 1.0, "a number in [0, 1)")
        _check_range("weight_decay", self.weight_decay, 0.0, float("inf"), "a finite number >= 0")


def build_adamw(config: AdamWConfig) -> OptimizerFactory:
    """Return a maker of `torch.optim.AdamW`."""
    import torch

    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    return make


def build_sgd(config: SgdConfig) -> OptimizerFactory:
    """Return a maker of `torch.optim.SGD`."""
    import torch

    def make(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
        )

    return make
