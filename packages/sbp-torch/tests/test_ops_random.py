"""Random numbers by counting: known answers, distributions, independence, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import Symbol
from sbp_torch.ops.operators import bind, makes_one_tensor, operator_of
from sbp_torch.ops.random import WORD, philox

OPS = torch.ops.sbp


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((WORD,) * 4, (WORD, WORD), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: tuple[int, ...], key: tuple[int, int], words: str
) -> None:
    made = philox([torch.tensor(word) for word in counter], key)

    assert " ".join(f"{int(word):08x}" for word in made) == words


def _largest_gap(sorted_values: torch.Tensor) -> float:
    """Return the statistic of Kolmogorov and Smirnov against [0, 1), times sqrt(n)."""
    count = len(sorted_values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    gap = torch.maximum(steps[1:] - sorted_values, sorted_values - steps[:-1])
    return float(gap.max()) * math.sqrt(count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    made = OPS.random_uniform.default([100, 400], 7, 0, 0, dtype=dtype).double().flatten()

    assert made.min() >= 0 and made.max() < 1
    assert _largest_gap(made.sort()[0]) < 1.63  # exceeded once in a hundred seeds
    assert abs(torch.corrcoef(torch.stack([made[:-1], made[1:]]))[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_normal(dtype: torch.dtype) -> None:
    made = OPS.random_normal.default([100, 400], 7, 0, 0, mean=3.0, std=2.0, dtype=dtype)
    made = made.double().flatten()

    assert _largest_gap(torch.special.ndtr((made - 3) / 2).sort()[0]) < 1.63
    assert abs(torch.corrcoef(torch.stack([made[:-1], made[1:]]))[0, 1]) < 0.02


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_a_mask_is_true_as_often_as_asked(p: float) -> None:
    made = OPS.random_bernoulli.default([200, 200], 7, 0, 0, p=p)

    assert made.dtype == torch.bool
    assert abs(made.double().mean().item() - p) <= 4 * math.sqrt(p * (1 - p) / 40_000)


def test_integers_are_within_their_bounds_and_equally_frequent() -> None:
    made = OPS.random_integers.default([300, 100], 7, 0, 0, low=-1, high=4)

    counts = torch.bincount(made.flatten() + 1, minlength=5)
    assert len(counts) == 5
    assert (counts - 6000).abs().max() < 4 * math.sqrt(6000)


def test_reduced_precision_never_rounds_up_to_one() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert OPS.random_uniform.default([40_000], 7, 0, 0, dtype=dtype).max() < 1


@pytest.mark.parametrize("change", [(8, 1, 2), (5, 2, 2), (5, 1, 3), (5 + (1 << 32), 1, 2)])
def test_seed_step_and_site_each_change_all_numbers(change: tuple[int, int, int]) -> None:
    before = OPS.random_uniform.default([50], 5, 1, 2)

    assert not (OPS.random_uniform.default([50], *change) == before).any()


def test_a_column_draws_what_a_vector_draws() -> None:
    assert torch.equal(
        OPS.random_normal.default([9, 1], 5, 1, 2).flatten(),
        OPS.random_normal.default([9], 5, 1, 2),
    )


def test_the_operators_are_executable_by_name() -> None:
    kwargs = {"dtype": Symbol("dtype", "float64"), "device": Symbol("device", "cpu")}
    bound = {key: bind(value, {}.__getitem__) for key, value in kwargs.items()}

    made = operator_of("sbp.random_uniform.default")([2, 3], 5, 1, 2, **bound)

    assert made.dtype == torch.float64
    assert makes_one_tensor("sbp.random_uniform.default")


@pytest.mark.parametrize(
    ("name", "size", "given"),
    [
        ("uniform", [4], {"start": [2], "logical": [5]}),
        ("uniform", [4], {"dtype": torch.int64}),
        ("bernoulli", [4], {"p": 1.5}),
        ("integers", [4], {"low": 3, "high": 3}),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    name: str, size: list[int], given: dict[str, object]
) -> None:
    with pytest.raises(SbpValueError, match=r"random numbers|probability|integers"):
        getattr(OPS, f"random_{name}").default(size, 5, 1, 2, **given)


def test_a_step_that_the_counter_has_no_room_for_is_refused() -> None:
    with pytest.raises(SbpValueError, match="step"):
        OPS.random_uniform.default([4], 5, 1 << 32, 2)
