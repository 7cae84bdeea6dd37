"""The optimizers: settings that reach torch, and those that are refused before it."""

from __future__ import annotations

import math

import pytest
import torch

from sbp_core.errors import ConfigError
from sbp_launch.optimizers import (
    AdafactorConfig,
    AdamWConfig,
    LarsConfig,
    MuonConfig,
    OptimizerConfig,
    RmspropConfig,
    SgdConfig,
    build_adamw,
    build_lars,
    build_muon,
    build_sgd,
    optimizer_over,
)
from sbp_torch.optim import CombinedOptimizer


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


@pytest.mark.parametrize(
    ("config", "setting", "value"),
    [
        (SgdConfig, "momentum", 1.0),
        (SgdConfig, "dampening", 1.0),
        (RmspropConfig, "alpha", -0.1),
        (LarsConfig, "trust", 0.0),
        (AdafactorConfig, "beta2_decay", 0.0),
        (AdafactorConfig, "d", math.nan),
        (MuonConfig, "ns_steps", 100),
        (MuonConfig, "adamw_lr", 0.0),
    ],
)
def test_settings_out_of_range_are_refused(
    config: type[OptimizerConfig], setting: str, value: float
) -> None:
    with pytest.raises(ConfigError, match=f"{setting}="):
        config(**{setting: value})


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nesterov=True with momentum=0\.0"):
        SgdConfig(nesterov=True, momentum=0.0)


def small_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))


def test_patterns_make_groups_of_their_own() -> None:
    config = AdamWConfig(
        groups={"1.*": {"weight_decay": 0.0, "lr": 0.5}, "*.bias": {"weight_decay": 0.0}}
    )
    model = small_model()

    optimizer = optimizer_over(build_adamw(config), model)

    rest, norm, biases = optimizer.param_groups
    assert [len(group["params"]) for group in (rest, norm, biases)] == [2, 2, 2]
    assert (rest["lr"], rest["weight_decay"]) == (1e-3, 0.1)
    assert (norm["lr"], norm["weight_decay"]) == (0.5, 0.0)
    assert (biases["lr"], biases["weight_decay"]) == (1e-3, 0.0)
    assert biases["params"][0] is model[0].bias


def test_groups_may_switch_flags() -> None:
    config = LarsConfig(groups={"*.bias": {"adapt": False}})

    optimizer = optimizer_over(build_lars(config), small_model())

    assert [group["adapt"] for group in optimizer.param_groups] == [True, False]


def test_a_group_with_a_setting_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups.\*: no setting is called 'momentum'") as caught:
        AdamWConfig(groups={"*": {"momentum": 0.1}})

    assert caught.value.accepted == "amsgrad, eps, lr, weight_decay"


def test_a_group_with_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups\.\*\.bias: lr=-1\.0 is out of range"):
        AdamWConfig(groups={"*.bias": {"lr": -1.0}})


def test_a_pattern_that_matches_no_parameter_is_refused_with_the_nearest() -> None:
    make = build_adamw(AdamWConfig(groups={"*.bais": {"weight_decay": 0.0}}))

    with pytest.raises(ConfigError, match=r"the pattern '\*\.bais' matches no parameter") as caught:
        optimizer_over(make, small_model())

    assert caught.value.todo == "did you mean '*.bias'?"


def test_muon_refuses_patterns_of_what_it_does_not_move() -> None:
    biases = MuonConfig(groups={"*.bias": {"weight_decay": 0.0}})
    strange = MuonConfig(adamw=("*emb*", "nosuch.*"))

    with pytest.raises(ConfigError, match="matches no parameter"):
        optimizer_over(build_muon(biases), small_model())
    with pytest.raises(ConfigError, match=r"optimizer\.adamw: the pattern 'nosuch\.\*'"):
        optimizer_over(build_muon(strange), small_model())


def test_muon_leaves_vectors_and_named_matrices_to_adamw() -> None:
    model = small_model()
    config = MuonConfig(adamw=("2.*",), adamw_lr=0.25)

    optimizer = optimizer_over(build_muon(config), model)

    assert isinstance(optimizer, CombinedOptimizer)
    matrices, others = optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(model[0].weight)]
    assert (len(others["params"]), others["lr"]) == (5, 0.25)


def test_a_maker_that_takes_no_names_gets_parameters() -> None:
    optimizer = optimizer_over(lambda given: torch.optim.SGD(given, lr=0.1), small_model())

    assert "param_names" not in optimizer.param_groups[0]
