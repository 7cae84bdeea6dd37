import numpy as np
import pytest
import torch

from sbp_models.clicks import Clicks
from sbp_models.configs import ClicksConfig


def make(**settings: object) -> Clicks:
    return Clicks(ClicksConfig(**settings))


def test_a_batch_has_numbers_features_and_clicks() -> None:
    batch = make(num_dense=4, rows=(9, 1, 3), bag=2).samples(np.arange(500))

    assert batch["dense"].shape == (500, 4)
    assert batch["sparse"].shape == (500, 3, 2)
    assert batch["clicks"].shape == (500,)
    assert batch["sparse"].dtype == torch.int64
    assert batch["dense"].dtype == batch["clicks"].dtype == torch.float32
    assert set(batch["clicks"].tolist()) == {0.0, 1.0}


def test_every_value_of_a_feature_occurs_and_the_low_ones_most_often() -> None:
    values = make(rows=(9, 1, 3)).samples(np.arange(5000))["sparse"]

    counts = torch.bincount(values[:, 0].flatten())
    assert len(counts) == 9
    assert counts.min() > 0
    assert counts[0] > 2 * counts[2] > 4 * counts[8]
    assert values[:, 1].max() == 0
    assert values[:, 2].max() == 2


def test_numbers_and_features_both_tell_of_clicks() -> None:
    batch = make(num_dense=2, rows=(4, 4)).samples(np.arange(20000))
    base = batch["clicks"].mean()

    by_value = torch.stack(
        [batch["clicks"][batch["sparse"][:, 0, 0] == value].mean() for value in range(4)]
    )
    high = batch["clicks"][batch["dense"][:, 0] > 1].mean()
    low = batch["clicks"][batch["dense"][:, 0] < -1].mean()

    assert 0.1 < base < 0.9
    assert by_value.max() - by_value.min() > 0.1
    assert abs(high - low) > 0.1


def test_the_rule_is_the_same_in_every_split_and_another_with_another_seed() -> None:
    def effect(seed: int, split: str) -> float:
        batch = make(seed=seed, num_dense=1, rows=(2,)).samples(np.arange(20000), split)
        return torch.corrcoef(torch.stack([batch["dense"][:, 0], batch["clicks"]]))[0, 1].item()

    train, held = effect(0, "train"), effect(0, "validation")
    others = [effect(seed, "train") for seed in range(1, 4)]

    assert train == pytest.approx(held, abs=0.03)
    assert max(abs(train - other) for other in others) > 0.1
