"""The thread that loads ahead: bounded, in order, and heard of where it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from held_batches import Noting, layout, source_of

from sbp_core.errors import PluginError, SbpError
from sbp_launch.data import BatchLoader, DataCursor, LocalPart, SampleOrder
from sbp_launch.data import loader as loader_module

DEADLINE_S = 30.0


def loader_of(data: Noting, *, ahead: int, num_batches: int | None = None) -> BatchLoader:
    """Return what loads batches of four on one rank."""
    cursor = DataCursor(order=SampleOrder(num_samples=data.size))
    part = LocalPart(layout("one rank", 4, 1), [0])
    return BatchLoader(
        source_of(data), "train", cursor, 4, part, ahead=ahead, num_batches=num_batches
    )


def waited(condition: threading.Condition, until: Callable[[], bool]) -> None:
    with condition:
        assert condition.wait_for(until, DEADLINE_S)


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
def test_batches_are_the_same_however_far_they_are_loaded_ahead(ahead: int) -> None:
    order = SampleOrder(num_samples=10)

    with loader_of(Noting(10), ahead=ahead) as loader:
        found = [loader.next() for _ in range(6)]

    for index, batch in enumerate(found):
        wanted = order.numbers(4 * index + np.arange(4))
        assert batch.values["y"].tolist() == (-wanted).tolist()
        assert (batch.begin.position, batch.end.position) == (4 * index, 4 * index + 4)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_more_is_loaded_than_there_are_credits(ahead: int) -> None:
    state, counts = threading.Condition(), {"taken": 0, "begun": 0, "most": 0}

    def begun(numbers: list[int]) -> None:
        with state:
            counts["begun"] += 1
            counts["most"] = max(counts["most"], counts["begun"] - counts["taken"])
            state.notify_all()

    with loader_of(Noting(100, begun), ahead=ahead) as loader:
        for _ in range(8):
            # The thread uses all credits, and then waits.
            waited(state, lambda: counts["begun"] - counts["taken"] == ahead)
            with state:
                counts["taken"] += 1  # before, as the thread goes on at once
            loader.next()

    assert counts["most"] == ahead


def test_no_more_is_loaded_than_will_be_asked_for() -> None:
    data = Noting(100)

    with loader_of(data, ahead=5, num_batches=3) as loader:
        for _ in range(3):
            loader.next()
        loader._thread.join(DEADLINE_S)

        assert not loader._thread.is_alive()
    assert len(data.asked) == 3


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_an_error_comes_with_its_batch_and_names_the_sample(ahead: int) -> None:
    order = SampleOrder(num_samples=40)
    bad = int(order.numbers(np.array([9]))[0])  # of the third batch

    def fails(numbers: list[int]) -> None:
        if bad in numbers:
            raise ValueError("a broken picture")

    with loader_of(Noting(40, fails), ahead=ahead) as loader:
        loader.next(), loader.next()
        for _ in range(2):
            with pytest.raises(PluginError, match=f"sample {bad} of split 'train': ValueError: a"):
                loader.next()


def test_whatever_ends_the_thread_is_heard_by_the_step() -> None:
    def leaves(numbers: list[int]) -> None:
        raise SystemExit(3)

    said = "loading split 'train' failed: SystemExit: 3"
    with loader_of(Noting(40, leaves), ahead=2) as loader, pytest.raises(SbpError, match=said):
        loader.next()


@pytest.mark.parametrize("taken", [0, 1])
def test_closing_ends_the_thread_whatever_it_does(taken: int) -> None:
    loader = loader_of(Noting(100), ahead=2)
    for _ in range(taken):
        loader.next()

    loader.close()

    assert not loader._thread.is_alive()
    loader.close()


def test_a_data_set_that_never_returns_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loader_module, "STOP_S", 0.01)
    asked, answer = threading.Event(), threading.Event()

    def hangs(numbers: list[int]) -> None:
        asked.set()
        assert answer.wait(DEADLINE_S)

    loader = loader_of(Noting(100, hangs), ahead=1)
    assert asked.wait(DEADLINE_S)

    loader.close()

    assert "a sample of split 'train' has been loading for over 0.01 s" in caplog.text
    answer.set()
    loader._thread.join(DEADLINE_S)


def test_training_and_evaluation_do_not_ask_the_data_set_at_once() -> None:
    inside, most = [], []

    def alone(numbers: list[int]) -> None:
        inside.append(1)
        time.sleep(0.001)  # so that the other thread would come in
        most.append(len(inside))
        inside.pop()

    data = Noting(1000, alone)
    source = source_of(data)
    part = LocalPart(layout("one rank", 4, 1), [0])
    cursor = DataCursor(order=SampleOrder(num_samples=1000))
    loaders = [
        BatchLoader(source, split, cursor, 4, part, ahead=50, num_batches=50)
        for split in ("train", "validation")
    ]
    for _ in range(50):
        first, second = (loader.next().values for loader in loaders)
        assert torch.equal(first["x"], second["x"])
    for loader in loaders:
        loader.close()

    assert set(most) == {1}


@pytest.mark.parametrize("ahead", [0, 2])
def test_batches_for_gpus_are_put_into_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    pinned: list[list[float]] = []

    def pin_memory(self: torch.Tensor) -> torch.Tensor:
        pinned.append(self.tolist())
        return self.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    cursor = DataCursor(order=SampleOrder(num_samples=10))
    part = LocalPart(layout("one rank", 4, 1), [0])

    with BatchLoader(
        source_of(Noting(10)), "train", cursor, 4, part, ahead=ahead, num_batches=2, pinned=True
    ) as loader:
        batches = [loader.next().values for _ in range(2)]

    assert not torch.equal(batches[0]["y"], batches[1]["y"])
    assert all(batch[name].tolist() in pinned for batch in batches for name in "xy")


def test_ranks_that_read_no_batch_load_nothing_and_know_the_cursor() -> None:
    data = Noting(10)
    part = LocalPart(layout("nothing between", 4, 1), [1])
    cursor = DataCursor(order=SampleOrder(num_samples=10))

    with BatchLoader(source_of(data), "train", cursor, 4, part, ahead=2) as loader:
        found = [loader.next() for _ in range(3)]

    assert data.asked == []
    assert [batch.values for batch in found] == [{}] * 3
    assert found[-1].end.position == 12


class Augmenting(Noting):
    """Augmented, `y` is 1000 times the epoch and the number."""

    def augment(self, samples: Any, numbers: Any, epochs: Any) -> dict[str, torch.Tensor]:
        assert torch.equal(samples["y"], -torch.from_numpy(numbers))
        return {**samples, "y": torch.from_numpy(1000 * epochs + numbers)}


@pytest.mark.parametrize(
    ("name", "ranks", "rows"),
    [("one rank", [0], slice(4)), ("data", [0], slice(2)), ("data", [1], slice(2, 4))],
)
def test_samples_are_augmented_by_their_epochs_whatever_ranks_there_are(
    name: str, ranks: list[int], rows: slice
) -> None:
    order = SampleOrder(num_samples=10)
    begin = DataCursor(position=7, order=order)  # so the batch goes over the border of two epochs
    part = LocalPart(layout(name, 4, 1), ranks)

    with BatchLoader(source_of(Augmenting(10)), "train", begin, 4, part) as loader:
        found = loader.next()

    wanted = order.numbers(np.arange(7, 11)) + np.array([0, 0, 0, 1000])
    assert found.values["y"].tolist() == wanted[rows].tolist()


def test_held_out_samples_are_not_augmented() -> None:
    cursor = DataCursor(order=SampleOrder(num_samples=10))
    part = LocalPart(layout("one rank", 4, 1), [0])

    with BatchLoader(source_of(Augmenting(10)), "validation", cursor, 4, part) as loader:
        found = loader.next()

    assert (found.values["y"] <= 0).all()
