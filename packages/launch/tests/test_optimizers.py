"""The optimizers: settings that reach torch, and those that are refused before it."""

from __future__ import annotations

import math

import pytest
import torch

from sbp_core.errors import ConfigError
from sbp_launch.optimizers import AdamWConfig, SgdConfig, build_adamw, build_sgd


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_learning_rate_is_finite_and_positive(value: float) -> None:
    with pytest.raises(ConfigError, match="lr="):
        AdamWConfig(lr=value)
    with pytest.raises(ConfigError, match="lr="):
        SgdConfig(lr=value)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9)])
def test_decays_are_in_the_unit_interval(betas: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="betas="):
        AdamWConfig(betas=betas)


def test_adamw_gets_its_settings() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    config = AdamWConfig(lr=0.5, betas=(0.1, 0.2), eps=0.3, weight_decay=0.4)

    optimizer = build_adamw(config)([parameter])

    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.5,
        (0.1, 0.2),
        0.3,
        0.4,
    )


def test_sgd_gets_its_settings() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))

    optimizer = build_sgd(SgdConfig(lr=0.5, momentum=0.1, weight_decay=0.2))([parameter])

    assert type(optimizer) is torch.optim.SGD
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.1, 0.2)
