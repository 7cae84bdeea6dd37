"""A batch that is nested in another way than the example is told how the example was."""

from __future__ import annotations

import pytest

from sbp_core.errors import SbpValueError
from sbp_launch.step.batch_names import check_batch_names


@pytest.mark.parametrize(
    ("given", "example", "told"),
    [
        (["x", "y"], ["0", "1"], "a mapping with 'x', 'y', and the example was a tuple or list of"),
        (["0", "1"], ["text.ids", "text.mask"], "list of 2, and the example was a mapping with 't"),
        (["batch"], ["0.x", "0.y", "1"], "one tensor, and the example was a tuple or list of 2"),
        (["x"], ["batch"], "a mapping with 'x', and the example was one tensor"),
    ],
)
def test_a_batch_of_another_kind_is_told_what_the_example_was(given, example, told):
    with pytest.raises(SbpValueError, match=told):
        check_batch_names(given, example)


@pytest.mark.parametrize(
    ("given", "example"),
    [(["x"], ["x", "y"]), (["0", "1", "2"], ["0", "1"]), ([], ["0"]), (["x"], []), (["b"], ["a"])],
)
def test_names_of_the_same_kind_are_left_to_the_session(given, example):
    check_batch_names(given, example)
