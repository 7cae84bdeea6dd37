"""The garbage collector, while a step is planned."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from trainable import registry

from sbp_core.collection import collection_paused
from sbp_core.errors import CaptureError
from sbp_core.exports import lazy_room
from sbp_launch import parallelize


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


def test_what_was_frozen_stays_so() -> None:
    gc.enable()
    gc.freeze()
    try:
        with collection_paused():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_what_is_offered_is_loaded_while_it_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = f"room_{tmp_path.name}"
    (tmp_path / room).mkdir()
    (tmp_path / room / "home.py").write_text("import gc\nwas_on = gc.isenabled()\n", "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    gc.enable()

    find, _ = lazy_room(room, home="was_on")

    assert find("was_on") is False
    assert gc.isenabled()


def test_parallelize_pauses_it_while_it_plans_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbp_launch.parallel.choices.discover", registry)
    gc.enable()
    seen = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(gc.isenabled())
        raise ValueError("seen")

    model = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="seen"):
        parallelize(
            model,
            loss,
            torch.ones(2, 2),
            torch.optim.SGD(model.parameters()),
            planner="even",
            runtime="reference",
        )

    assert set(seen) == {False}
    assert gc.isenabled()


def test_a_step_that_is_over_is_freed_before_the_next_one_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbp_launch.parallel.choices.discover", registry)
    gc.enable()

    def trained() -> weakref.ref[nn.Module]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        with parallelize(
            model,
            lambda model, batch: model(batch).square().sum(),
            torch.ones(2, 2),
            optimizer,
            planner="even",
            runtime="reference",
        ) as step:
            step(torch.ones(2, 2))
        return weakref.ref(model)

    models = [trained() for _ in range(3)]

    assert [one() is None for one in models[:2]] == [True, True]
