"""Whatever keeps a checkpoint from being saved: a clear error, and the one before it is whole."""

from __future__ import annotations

import errno
import inspect
import itertools
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_states import STATES, pieces_of, states_of_run
from trainable import QUIET, registry, run_config

from sbp_core.errors import ConfigError, RunError
from sbp_core.placement import Placement
from sbp_core.runtime import StatePiece
from sbp_core.sbp import B, NdSbp
from sbp_launch.checkpoint import folder_storage
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.places import newest_first
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes, save
from sbp_launch.checkpoint.settings import CheckpointConfig
from sbp_launch.settings.config import RunConfig
from sbp_launch.trainer import trainer
from sbp_launch.trainer.checkpoints import RunCheckpoints

PIECES = pieces_of(STATES, Placement([0], ("rank",)), NdSbp(B))[0]

FAILURES: tuple[Callable[[], BaseException], ...] = (
    lambda: OSError(errno.ENOSPC, "No space left on device"),
    lambda: OSError(errno.EROFS, "Read-only file system"),
    lambda: OSError(errno.EIO, "Input/output error"),
    KeyboardInterrupt,
    MemoryError,
)


def save_step(storage: LocalStorage, step: int) -> None:
    metadata = Metadata(step=step, seed=0)
    save(storage, f"step-{step:08d}", metadata, PIECES, Processes())


def check(storage: LocalStorage, names: list[str]) -> None:
    """See that these checkpoints are there, whole, and nothing else is."""
    assert newest_first(storage) == names
    for name in names:
        with Checkpoint(storage, name) as found:
            assert all(torch.equal(found[one], value) for one, value in STATES.items())
            assert f"step-{found.manifest.metadata.step:08d}" == name
    inside = sorted(path.name for path in storage.root.iterdir() if path.name != ".lock")
    assert inside == sorted(names)


class FailingAt:
    """Fails at the n-th thing that the file system is asked to do."""

    def __init__(self, number: int, error: BaseException) -> None:
        self.left, self.error = number, error

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in (
            (Path, "mkdir"),
            (folder_storage, "DirectFile"),
            (Path, "rename"),
            (folder_storage.os, "fsync"),
            (folder_storage, "sync"),
        ):
            patch.setattr(owner, name, self._failing(getattr(owner, name)))

    def _failing(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*given: object, **named: object) -> object:
            self.count()
            return call(*given, **named)

        return counted


@pytest.mark.slow
@settings(max_examples=60, deadline=None)  # disks have their own
@given(number=st.integers(1, 18), failure=st.sampled_from(FAILURES), replaces=st.booleans())
def test_at_whatever_call_a_save_fails_the_earlier_checkpoints_are_whole(
    number: int, failure: Callable[[], BaseException], replaces: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        storage = LocalStorage(Path(folder) / "checkpoints")
        save_step(storage, 1)
        save_step(storage, 2)
        error, step = failure(), 2 if replaces else 3
        failing = FailingAt(number, error)
        with patch.context() as inner:
            failing.patch(inner)
            expected = RunError if isinstance(error, OSError) else type(error)
            try:
                save_step(storage, step)
            except expected as caught:
                if expected is RunError:
                    assert str(error.strerror) in str(caught)
                    assert "cannot be written" in str(caught)
                    assert "make room" in str(caught)
            else:
                assert failing.left > 0, "an error was passed over"

        with storage.claim():  # as the next run does
            names = newest_first(storage)
            assert names[-2:] == ["step-00000002", "step-00000001"]
            check(storage, names)
        save_step(storage, step)
        check(storage, [f"step-{one:08d}" for one in range(step, 0, -1)])


@contextmanager
def noted_calls(root: Path) -> Iterator[list[str]]:
    """Note what is synced, renamed and removed below a folder in the block, in order."""
    calls: list[str] = []

    def short(path: object) -> str:
        return str(path).removeprefix(str(root)).lstrip("/") or "."

    def noted(word: str, call: Callable[..., object]) -> Callable[..., object]:
        def told(path: object, *given: object, **named: object) -> object:
            if word != "sync":
                calls.append(f"{word} {short(path)}")
            else:
                assert isinstance(path, int)
                calls.append(f"sync {short(Path(f'/proc/self/fd/{path}').readlink())}")
            return call(path, *given, **named)

        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted("sync", os.fsync))
        patch.setattr(Path, "rename", noted("rename", Path.rename))
        patch.setattr(shutil, "rmtree", noted("remove", shutil.rmtree))
        yield calls


def test_a_checkpoint_is_renamed_when_all_of_it_is_durable_and_the_former_one_is_removed_last(
    tmp_path: Path,
) -> None:
    storage = LocalStorage(tmp_path / "run" / "kept")
    part, old, whole = (f"run/kept/{n}" for n in (".step-1.part", ".step-1.old", "step-1"))
    written = [f"sync {part}/{name}" for name in ("rank-00000.safetensors", "rank-00000.json",
                                                  "manifest.json")]  # fmt: skip

    with noted_calls(tmp_path) as calls:
        save(storage, "step-1", Metadata(step=1, seed=0), PIECES, Processes())
    assert sorted(calls[:2]) == ["sync .", "sync run"]  # new folders, in their parents
    assert calls[2:] == [
        *written, f"sync {part}", f"rename {part}", "sync run/kept",
    ]  # fmt: skip

    with noted_calls(tmp_path) as calls:
        save(storage, "step-1", Metadata(step=1, seed=0), PIECES, Processes())
    assert calls == [
        *written, f"sync {part}", f"rename {whole}", f"rename {part}",
        "sync run/kept", f"remove {old}",
    ]  # fmt: skip

    with noted_calls(tmp_path) as calls:
        storage.remove("step-1")
    assert calls == [f"rename {whole}", "sync run/kept", "remove run/kept/.step-1.gone"]


def test_what_is_removed_is_no_checkpoint_before_its_files_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    save_step(storage, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)  # as a kill in between

    storage.remove("step-00000001")

    assert list(storage.names()) == []


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    save_step(storage, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))  # as full after 500 bytes
    try:
        with pytest.raises(RunError, match="the checkpoint step-00000002 cannot be written: File"):
            save_step(storage, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    check(storage, ["step-00000001"])


def test_a_folder_that_vanishes_is_named_and_not_made_anew(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "disk" / "checkpoints")
    save_step(storage, 1)
    shutil.rmtree(tmp_path / "disk")

    with pytest.raises(RunError, match="cannot be written: the folder no longer exists") as caught:
        save_step(storage, 2)

    assert caught.value.where == (str(storage.root),)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = os.mkdir

    def read_only(path: object, *given: object) -> None:
        if Path(str(path)).name == "checkpoints":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        made(path, *given)

    monkeypatch.setattr(os, "mkdir", read_only)

    with pytest.raises(ConfigError, match=r"cannot be written to .*: Read-only file system"):
        trainer.train(run_config(), registry(), tmp_path)
    assert not (tmp_path / "metrics.jsonl").exists()


def quiet(**changes: object) -> RunConfig:
    return run_config(steps=4, **QUIET, **changes)


@pytest.mark.slow
def test_a_second_run_in_one_folder_is_refused_and_the_first_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = folder_storage._StagedLocal.commit
    refused: list[ConfigError] = []

    def meanwhile(self: object, *given: object) -> None:
        with pytest.raises(ConfigError, match="another run writes its checkpoints") as caught:
            trainer.train(quiet(overwrite=True), registry(), tmp_path)
        refused.append(caught.value)
        write(self, *given)

    monkeypatch.setattr(folder_storage._StagedLocal, "commit", meanwhile)

    trainer.train(quiet(), registry(), tmp_path)

    assert len(refused) == 1
    assert states_of_run(tmp_path)["head.weight.step"].item() == 4


def test_a_run_that_is_refused_leaves_no_folder_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise ConfigError("no such data")

    monkeypatch.setattr(trainer, "make_program", refuse)

    with pytest.raises(ConfigError, match="no such data"):
        trainer.train(quiet(), registry(), tmp_path)

    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_while_it_trains_ends_the_run_with_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    create = folder_storage._StagedLocal.create
    files: list[str] = []

    @contextmanager
    def filling(self: folder_storage._StagedLocal, file: str) -> Iterator[BinaryIO]:
        files.append(file)
        with create(self, file) as opened:
            yield opened
            if len(files) > 3:  # the three files of the first checkpoint fit
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_storage._StagedLocal, "create", filling)
    config = quiet(checkpoint=CheckpointConfig(every=1, wait=True))

    with pytest.raises(RunError, match="step-00000002 cannot be written: No space left") as caught:
        trainer.train(config, registry(), tmp_path)

    assert "hydra.run.dir" in caught.value.todo
    told = capsys.readouterr().out
    assert "stopped early; the states are not saved: the checkpoint step-00000002" in told
    assert "the newest checkpoint is checkpoints/step-00000001\n  to continue: sbp-train" in told
    assert states_of_run(tmp_path)["head.weight.step"].item() == 1
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {".lock", "step-00000001"}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("wait", [True, False], ids=["between steps", "beside steps"])
@pytest.mark.parametrize("fault", ["full", "read-only", "gone"])
def test_a_run_whose_disk_takes_no_more_goes_on_from_what_it_saved(
    fault: str, wait: bool, tmp_path: Path
) -> None:
    folder, away = tmp_path / "run" / "checkpoints", tmp_path / "away"
    create, number = (
        folder_storage._StagedLocal.create,
        {"full": errno.ENOSPC, "read-only": errno.EROFS},
    )

    @contextmanager
    def failing(self: folder_storage._StagedLocal, file: str) -> Iterator[BinaryIO]:
        if self.name != "step-00000001" and fault == "gone" and folder.exists():
            folder.rename(away)  # as a disk that is no longer mounted
        with create(self, file) as opened:
            yield opened
            if self.name != "step-00000001" and fault in number:
                raise OSError(number[fault], os.strerror(number[fault]))

    config = quiet(checkpoint=CheckpointConfig(every=1, wait=wait))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_storage._StagedLocal, "create", failing)
        with pytest.raises(RunError, match=r"step-0000000[234] cannot be written: ") as caught:
            trainer.train(config, registry(), tmp_path / "run")

    words = "folder no longer exists" if fault == "gone" else os.strerror(number[fault])
    assert words in caught.value.what
    assert "make room" in caught.value.todo
    if fault == "gone":
        assert not folder.exists()
        away.rename(folder)
    check_names(folder, ["step-00000001"])
    again = replace(config, trainer=replace(config.trainer, resume="auto"))
    trainer.train(again, registry(), tmp_path / "run")
    assert states_of_run(tmp_path / "run")["head.weight.step"].item() == 4


def check_names(folder: Path, names: list[str]) -> None:
    """See that these checkpoints are there and whole, and nothing else is."""
    assert sorted(path.name for path in folder.iterdir()) == [".lock", *names]
    for name in names:
        with Checkpoint(LocalStorage(folder), name) as found:
            found.verify()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("jump_s", [1e9, -1e9], ids=["forwards", "backwards"])
def test_a_clock_that_is_set_changes_nothing(
    jump_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inspect.signature(RunCheckpoints).parameters["clock"].default is time.monotonic
    now, looks = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + jump_s * next(looks))
    config = quiet(checkpoint=CheckpointConfig(every=1, keep=2, wait=True))

    trainer.train(config, registry(), tmp_path / "each step")

    folder = tmp_path / "each step" / "checkpoints"
    check_names(folder, ["step-00000003", "step-00000004"])
    # As if the older one were of tomorrow: names say which is the newest.
    os.utime(folder / "step-00000003", (now() + 1e5, now() + 1e5))
    os.utime(folder / "step-00000004", (0, 0))
    more = replace(config.trainer, resume="auto", steps=5)
    trainer.train(replace(config, trainer=more), registry(), tmp_path / "each step")
    check_names(folder, ["step-00000004", "step-00000005"])

    by_time = quiet(checkpoint=CheckpointConfig(every="20min"))
    trainer.train(by_time, registry(), tmp_path / "by time")
    check_names(tmp_path / "by time" / "checkpoints", ["step-00000004"])


def test_pieces_of_this_test_are_all_states() -> None:
    assert all(isinstance(piece, StatePiece) for piece in PIECES)
    assert {piece.name for piece in PIECES} == STATES.keys()
