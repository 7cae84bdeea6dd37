"""Checkpoints that threads write while steps run: phases, what goes wrong, and the end."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from saved_states import STATES, pieces_of

from sbp_core.errors import RunError
from sbp_core.placement import Placement
from sbp_core.runtime import Snapshot, StatePiece
from sbp_core.sbp import B, NdSbp, S
from sbp_launch.checkpoint import background
from sbp_launch.checkpoint.background import BackgroundSave, BackgroundSaves
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes

MESH = Placement.grid((2,), ("a",), "cpu")
WAIT_S = 20.0


class Given(Snapshot):
    """Pieces, which can be read when a test says so."""

    def __init__(self, pieces: Sequence[StatePiece]) -> None:
        self.steps_done, self._pieces = 1, pieces
        self.readable, self.is_released = threading.Event(), False
        self.readable.set()

    def slices(self) -> Sequence[StatePiece]:
        return self._pieces

    def pieces(self) -> Iterator[StatePiece]:
        assert self.readable.wait(WAIT_S)
        yield from self._pieces

    def release(self) -> None:
        self.is_released = True


def snapshots() -> list[Given]:
    """Return those of two processes."""
    owned = pieces_of(STATES, MESH, NdSbp(S(0)))
    return [Given(owned[rank]) for rank in (0, 1)]


def alone() -> Given:
    return Given(pieces_of(STATES, Placement.grid((1,), ("a",), "cpu"), NdSbp(B))[0])


def saving(storage: LocalStorage, given: Given, processes: Processes | None = None) -> Any:
    metadata = Metadata(step=1, seed=0)
    return BackgroundSave(storage, "step-1", metadata, given, processes or Processes())


def two_processes(call: Callable[[Processes], object]) -> list[str]:
    """Call a function in two processes at the same time; return what went wrong in each."""
    barrier, texts = threading.Barrier(2), ["", ""]

    def gather_of(rank: int) -> Callable[[str], Sequence[str]]:
        def gather(text: str) -> Sequence[str]:
            texts[rank] = text
            barrier.wait(WAIT_S)
            found = list(texts)
            barrier.wait(WAIT_S)
            return found

        return gather

    def outcome(rank: int) -> str:
        try:
            call(Processes(rank=rank, ranks=(0, 1), gather=gather_of(rank)))
        except RunError as error:
            return str(error)
        return "done"

    with ThreadPoolExecutor(2) as processes:
        return list(processes.map(outcome, (0, 1)))


def assert_saved(root: Path) -> None:
    with Checkpoint(LocalStorage(root), "step-1") as found:
        found.verify()
        assert all(torch.equal(found[name], value) for name, value in STATES.items())


def test_a_checkpoint_is_there_behind_two_phases(tmp_path: Path) -> None:
    storage, given = LocalStorage(tmp_path), alone()
    given.readable.clear()
    save = saving(storage, given)

    assert save.is_busy and not save.is_done
    given.readable.set()
    save._thread.join(WAIT_S)
    assert given.is_released
    save.advance()
    assert not save.is_done
    save._thread.join(WAIT_S)
    assert list(storage.names()) == ["step-1"]
    save.advance()

    assert save.is_done
    assert_saved(tmp_path)


def test_what_is_under_way_is_named_as_there_when_it_is(tmp_path: Path) -> None:
    saves = BackgroundSaves()
    save = saving(LocalStorage(tmp_path), alone())
    saves.begin(save)
    save._thread.join(WAIT_S)

    assert saves.go_on() == ""
    assert saves.name == "step-1"
    save._thread.join(WAIT_S)
    assert saves.go_on() == "step-1"
    assert saves.name == ""


def test_nothing_is_committed_before_all_processes_are_through(tmp_path: Path) -> None:
    storage, given = LocalStorage(tmp_path), snapshots()
    given[1].readable.clear()
    seen: list[object] = []

    def process(processes: Processes) -> None:
        save = saving(storage, given[processes.rank], processes)
        if processes.is_first:
            save._thread.join(WAIT_S)
            seen.append(list(storage.names()))
            given[1].readable.set()
        save.finish()
        seen.append(list(storage.names()))

    assert two_processes(process) == ["done", "done"]
    assert seen == [[], ["step-1"], ["step-1"]]
    assert_saved(tmp_path)


def test_a_snapshot_is_written_piece_by_piece(tmp_path: Path) -> None:
    alive: list[weakref.ref[object]] = []
    most = 0

    class OneByOne(Given):
        def pieces(self) -> Iterator[StatePiece]:
            nonlocal most
            for piece in self._pieces:
                value = torch.as_tensor(piece.value).clone()
                alive.append(weakref.ref(value))
                yield replace(piece, value=value)
                del value
                most = max(most, sum(one() is not None for one in alive))

    save = saving(LocalStorage(tmp_path), OneByOne(alone()._pieces))
    save.finish()

    assert len(alive) == len(STATES)
    assert most == 0
    assert_saved(tmp_path)


class FullDisk(LocalStorage):
    """Has no room for the file of one rank, or for the manifest."""

    def __init__(self, root: Path, full: str) -> None:
        super().__init__(root)
        self.full = full

    def stage(self, name: str) -> Any:
        staged = super().stage(name)
        create = staged.create

        @contextmanager
        def full(file: str) -> Iterator[BinaryIO]:
            if file == self.full:
                raise OSError(28, "No space left on device")
            with create(file) as opened:
                yield opened

        staged.create = full  # type: ignore[method-assign] # on purpose
        return staged


@pytest.mark.parametrize(("full", "teller"), [("rank-00001.safetensors", 1), ("manifest.json", 0)])
def test_what_one_process_cannot_write_is_told_to_all(
    tmp_path: Path, full: str, teller: int
) -> None:
    storage, given = FullDisk(tmp_path, full), snapshots()
    saves = []

    def process(processes: Processes) -> None:
        saves.append(saving(storage, given[processes.rank], processes))
        saves[-1].finish()

    texts = two_processes(process)

    assert all("the checkpoint step-1 cannot be written" in text for text in texts)
    assert "No space left on device" in texts[teller]
    assert f"rank {teller} says: No space left on device" in texts[1 - teller]
    assert all(save.is_done for save in saves)
    assert all(one.is_released for one in given)
    assert list(storage.names()) == [] and list(tmp_path.iterdir()) == []


def test_an_unforeseen_error_of_the_thread_is_told_too(tmp_path: Path) -> None:
    given = alone()
    given._pieces = [None]  # type: ignore[list-item] # on purpose
    save = saving(LocalStorage(tmp_path), given)

    with pytest.raises(RunError, match="AttributeError"):
        save.finish()


def test_a_disk_that_does_not_answer_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LIMIT_S", 0.05)
    given = alone()
    given.readable.clear()
    save = saving(LocalStorage(tmp_path), given)

    with pytest.raises(RunError, match=r"was not written within 0\.05 s"):
        save.finish()

    given.readable.set()
    save._thread.join(WAIT_S)


def test_what_follows_the_commit_is_done_by_the_first_process(tmp_path: Path) -> None:
    storage, given, removed = LocalStorage(tmp_path), snapshots(), []

    def process(processes: Processes) -> None:
        BackgroundSave(
            storage,
            "step-1",
            Metadata(step=1, seed=0),
            given[processes.rank],
            processes,
            after_commit=lambda: removed.append((processes.rank, list(storage.names()))),
        ).finish()

    assert two_processes(process) == ["done", "done"]
    assert removed == [(0, ["step-1"])]
