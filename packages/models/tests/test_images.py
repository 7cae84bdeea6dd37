import numpy as np
import pytest
import torch

from sbp_core.errors import SbpLookupError
from sbp_models.configs import ImagesConfig
from sbp_models.images import StripedImages, build


def make(**settings: object) -> StripedImages:
    return build(ImagesConfig(**settings))


def test_a_batch_has_images_and_their_classes() -> None:
    batch = make(image_size=8, channels=1, num_classes=3).samples(np.arange(50))

    assert batch["images"].shape == (50, 1, 8, 8)
    assert batch["images"].dtype == torch.float32
    assert batch["labels"].dtype == torch.int64
    assert batch["labels"].unique().tolist() == [0, 1, 2]


def test_without_noise_the_best_match_of_all_patterns_is_of_the_right_class() -> None:
    data = make(noise=0.0)
    patterns, held = data.samples(np.arange(400)), data.samples(np.arange(100), "validation")

    distances = torch.cdist(held["images"].flatten(1), patterns["images"].flatten(1))

    guesses = patterns["labels"][distances.argmin(1)]
    assert (guesses == held["labels"]).float().mean() > 0.95


def test_noise_has_the_deviation_that_is_asked_for() -> None:
    quiet, loud = (make(noise=noise).samples(np.arange(20))["images"] for noise in (0.0, 0.7))

    assert (loud - quiet).std().item() == pytest.approx(0.7, rel=0.02)
    assert quiet.abs().max() <= 1


def test_another_seed_gives_other_samples() -> None:
    first, other = (make(seed=seed).samples(np.arange(8)) for seed in (0, 1))

    assert not torch.equal(first["labels"], other["labels"])


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SbpLookupError, match="did you mean 'validation'") as caught:
        make().samples(np.arange(1), "validate")

    assert caught.value.accepted == "train, validation"


def test_the_numbers_of_a_sample_stay_the_same() -> None:
    batch = make(image_size=4).samples(np.arange(3))

    assert batch["labels"].tolist() == [8, 9, 2]
    assert batch["images"][1, :, 0, :2].flatten().tolist() == pytest.approx(
        [0.3657037, 0.3296686, -0.7091954, -0.2483459, -0.5947685, -0.1963134]
    )


def test_the_number_of_classes_costs_no_memory() -> None:
    data = make(num_classes=10**12)

    labels = data.samples(np.arange(50))["labels"]

    assert len(labels.unique()) == 50
    assert labels.max() < 10**12
