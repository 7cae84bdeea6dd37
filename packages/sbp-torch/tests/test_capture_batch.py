from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_torch.graph_capture import capture
from sbp_torch.graph_capture.batch import flatten_batch, rebuild_batch


class _Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class _Sample:
    x: Tensor
    mask: Tensor | None


def _numbered(value: float) -> Tensor:
    return torch.full((2,), value)


_LEAVES = st.one_of(st.floats(-9, 9).map(_numbered), st.none())
_NESTED = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3),
        st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner, max_size=3).map(UserDict),
    ),
    max_leaves=8,
)


def _same(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict | UserDict):
        assert isinstance(right, dict | UserDict)
        return type(left) is type(right) and all(_same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        assert isinstance(right, list | tuple)
        return type(left) is type(right) and all(map(_same, left, right))
    return left == right


@pytest.mark.slow
@given(_NESTED)
def test_a_batch_of_any_form_comes_back_from_its_tensors(batch: object) -> None:
    doubled = {name: tensor * 2 for name, tensor in flatten_batch(batch).items()}

    once = rebuild_batch(batch, doubled)
    back = rebuild_batch(once, {name: tensor / 2 for name, tensor in doubled.items()})

    assert _same(back, batch)
    assert flatten_batch(once).keys() == doubled.keys()


def test_names_are_the_way_to_a_tensor() -> None:
    x, y, z = map(_numbered, (1, 2, 3))

    found = flatten_batch({"text": (x, None, [y]), "size": None, "z": z})

    assert found == {"text.0": x, "text.2.0": y, "z": z}
    assert flatten_batch(x) == {"batch": x}


def test_named_tuples_dataclasses_and_frozen_mappings_keep_their_types() -> None:
    batch = (_Pair(_numbered(1), _numbered(2)), _Sample(_numbered(3), None))

    pair, sample = rebuild_batch(batch, flatten_batch(batch))

    assert isinstance(pair, _Pair) and isinstance(sample, _Sample)
    assert sample.mask is None
    frozen = MappingProxyType({"x": _numbered(1)})
    assert torch.equal(rebuild_batch(frozen, {"x": _numbered(4)})["x"], _numbered(4))


def test_the_batch_itself_is_not_changed() -> None:
    batch = {"x": _numbered(1)}

    rebuild_batch(batch, {"x": _numbered(2)})

    assert torch.equal(batch["x"], _numbered(1))


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"two tensors of the batch are called 'a\.b'"):
        flatten_batch({"a": {"b": _numbered(1)}, "a.b": _numbered(2)})


class _Unknown:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@pytest.mark.parametrize("make", [_Unknown, lambda x: x.numpy(), lambda x: np.int64(len(x))])
def test_a_batch_with_an_unknown_object_is_refused_with_the_way_to_it(
    make: Callable[[Tensor], Any],
) -> None:
    with pytest.raises(CaptureError, match=r"'a\.0' of the batch is of type "):
        flatten_batch({"a": [make(torch.zeros(3))]})


@pytest.mark.parametrize("value", [3, 0.5, True, 1j, "mean", b"mean", torch.float32])
def test_a_plain_value_in_a_batch_is_refused_as_it_would_never_change(value: object) -> None:
    with pytest.raises(CaptureError, match=r"'options.0' of the batch is .* of type") as caught:
        flatten_batch({"x": torch.zeros(3), "options": [value]})

    assert "the same in every step" in caught.value.what
    assert "put it into the loss function" in caught.value.todo
    assert ("torch.tensor(" in caught.value.todo) == isinstance(value, int | float | complex)


def test_a_batch_that_is_a_number_is_refused() -> None:
    with pytest.raises(CaptureError, match="the batch is 3 of type int"):
        flatten_batch(3)


def test_a_number_beside_tensors_is_refused_at_capture() -> None:
    batch = {"x": torch.zeros(3, 2), "n": 3}

    with pytest.raises(CaptureError, match="'n' of the batch is 3 of type int"):
        capture(nn.Linear(2, 1), lambda model, b: model(b["x"]).sum() * b["n"], batch)
