"""The garbage collector, while a step is planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_launch import parallelize
from sbp_launch.collection import collection_paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was_behind_the_block(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()

    with pytest.raises(KeyError), collection_paused():
        inside = gc.isenabled()
        raise KeyError

    assert (inside, gc.isenabled()) == (False, was_on)


def test_parallelize_pauses_it_while_it_plans_and_no_longer() -> None:
    gc.enable()
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        raise ValueError("seen")

    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="seen"):
        parallelize(model, loss, torch.ones(2, 2), torch.optim.SGD(model.parameters()))

    assert set(seen) == {False}
    assert gc.isenabled()
