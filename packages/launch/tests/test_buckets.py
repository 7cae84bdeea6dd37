"""Padding to a few sizes: what it gives and refuses; training is tested in `integration/`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError, SbpValueError
from sbp_launch.parallel import LengthBuckets
from sbp_launch.step.buckets import BucketPadding, Padding, make_padding
from sbp_launch.world import World
from sbp_torch.graph_capture import SampleDims

ALONE, OF_TWO = World(), World(rank=0, size=2)

DTYPES = (torch.int64, torch.int16, torch.float32, torch.bfloat16, torch.bool)


class Said:
    """A team of two, whose other process has said a size, or why it cannot."""

    def __init__(self, size: int = 0, problem: str = "") -> None:
        self.size, self.problem = 2**62 if problem else size, problem

    def highest_of(self, values: list[int]) -> list[int]:
        return [max(*values, self.size)]

    def gather(self, text: str) -> list[str]:
        return [text, self.problem]


def ids(length: int, rows: int = 2) -> torch.Tensor:
    return torch.arange(1, rows * length + 1).reshape(rows, length)


def padding_of(
    length: int = 3, team: Any = None, world: World = ALONE, **others: Any
) -> BucketPadding:
    buckets = LengthBuckets(sizes=(4, 8), values={"x": -1})
    made = BucketPadding(buckets, {"x": ids(length), **others}, world)
    if team is not None:
        made.begin(team)
    return made


@given(st.data())
def test_padding_keeps_what_there_is_and_fills_the_rest(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 3))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4, unique=True))
    length = data.draw(st.integers(0, max(sizes)))
    rows = data.draw(st.integers(0, 3))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    values = {f"x.{index}": data.draw(st.sampled_from([0, 1])) for index in range(len(dtypes))}
    shape = [rows, 2, 3, 2][: data.draw(st.integers(dim + 1, 4))]
    shape[dim] = length
    batch = {"x": [torch.ones(shape).to(dtype) for dtype in dtypes], "y": torch.zeros(rows)}
    before = [one.clone() for one in batch["x"]]
    padding = BucketPadding(LengthBuckets(sizes=sizes, values=values, dim=dim), batch, ALONE)

    found = padding(batch, "global")

    size = min(one for one in sizes if one >= length)
    assert all(torch.equal(*pair) for pair in zip(batch["x"], before, strict=True))
    assert found["y"] is batch["y"] and type(found) is dict
    for index, one in enumerate(found["x"]):
        assert one.dtype == dtypes[index] and one.shape[dim] == size
        assert torch.equal(one.narrow(dim, 0, length), before[index])
        assert bool((one.narrow(dim, length, size - length) == values[f"x.{index}"]).all())
    assert padding.resize(found, length)["x"][0].shape == before[0].shape
    if length == size:
        assert found is batch


def test_sizes_are_sorted_and_shown_as_they_are_made() -> None:
    buckets = LengthBuckets(sizes=(8, 4), values={"x": 0})

    assert buckets.sizes == (4, 8)
    assert eval(repr(buckets)) == buckets
    assert [buckets.size_for(length) for length in (0, 4, 5, 8, 9)] == [4, 4, 8, 8, None]
    assert LengthBuckets.of({"sizes": [8, 4], "values": {"x": 0}}) == buckets
    assert (
        LengthBuckets.of(None) is None
        and type(make_padding(None, ids(3), ALONE, SampleDims())) is Padding
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"sizes": 8}, r"sizes is 8(.|\n)*sizes=\(8,\)"),
        ({"values": ["x"]}, r"values=\['x'\] has no value for any tensor"),
        ({"values": {}}, "values={} has no value for any tensor"),
        ({"sizes": ()}, "sizes are "),
        ({"sizes": (0, 4)}, "sizes are "),
        ({"sizes": (4, 4)}, "sizes are "),
        ({"sizes": range(1, 18)}, "17 lengths, and a step has at most 16 forms"),
        ({"dim": -1}, "dim is -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LengthBuckets(**{"sizes": (4, 8), "values": {"x": 0}, **settings})


def test_an_argument_that_says_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pad_to\.size(.|\n)*sizes"):
        LengthBuckets.of({"size": (4,), "values": {"x": 0}})
    with pytest.raises(ConfigError, match=r"pad_to is \(4, 8\)"):
        LengthBuckets.of((4, 8))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "value", "is_held"),
    [
        (torch.int64, -(2**62) + 1, True),
        (torch.int64, 0.5, False),
        (torch.int64, 1.0, True),
        (torch.uint8, -100, False),
        (torch.int16, 2**40, False),
        (torch.float16, -1e30, False),
        (torch.float32, -math.inf, True),
        (torch.float32, math.nan, True),
        (torch.bool, False, True),
        (torch.bool, -100, False),
    ],
)
def test_a_value_that_a_dtype_does_not_hold_is_refused(
    dtype: torch.dtype, value: float, is_held: bool
) -> None:
    buckets = LengthBuckets(sizes=(4,), values={"batch": value})
    example = torch.ones(2, 3).to(dtype)

    if not is_held:
        with pytest.raises(ConfigError, match=r"'batch' is of dtype \w+, which does not hold"):
            BucketPadding(buckets, example, ALONE)
        return
    found = BucketPadding(buckets, example, ALONE)(example, "global")
    wanted = torch.full((2, 1), value, dtype=dtype)
    torch.testing.assert_close(found[:, 3:], wanted, rtol=0, atol=0, equal_nan=True)


def test_what_is_not_named_has_to_be_as_in_the_example() -> None:
    padding = padding_of(fixed=torch.ones(2, 6), weight=torch.ones(2))

    fits = {"x": ids(6), "fixed": torch.ones(2, 6), "weight": torch.ones(2)}
    assert padding(fits, "global")["x"].shape == (2, 8)
    with pytest.raises(SbpValueError, match=r"'fixed' has 5 positions at dim 1, had 6(.|\n)*add"):
        padding({**fits, "fixed": torch.ones(2, 5)}, "global")
    with pytest.raises(ConfigError, match=r"'y' has 3 positions at dim 1(.|\n)*another length"):
        padding_of(y=ids(3))


def test_processes_take_the_largest_of_their_sizes() -> None:
    padding = padding_of(team=Said(8), world=OF_TWO)

    assert padding({"x": ids(2)}, "local")["x"].shape == (2, 8)
    assert padding({"x": ids(2)}, "global")["x"].shape == (2, 4)
    assert padding_of(team=Said(4), world=OF_TWO)({"x": ids(5)}, "local")["x"].shape == (2, 8)


def test_all_processes_are_told_of_a_part_that_cannot_be_padded() -> None:
    padding = padding_of(team=Said(problem="'x' has 9 positions"), world=OF_TWO)

    with pytest.raises(SbpValueError, match=r"rank 1 cannot pad its part(.|\n)*: 'x' has 9"):
        padding({"x": ids(2)}, "local")
    with pytest.raises(SbpValueError, match=r"^'x' has 10 positions at dim 1, more than"):
        padding({"x": ids(10)}, "local")
