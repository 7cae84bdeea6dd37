"""Runs whose checkpoints are written while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainable import QUIET, registry, run_config

from sbp_core.errors import ConfigError, RunError
from sbp_core.runtime import Snapshot
from sbp_launch.checkpoint import Checkpoint, LocalStorage, background
from sbp_launch.checkpoint.places import newest_first
from sbp_launch.checkpoint.settings import CheckpointConfig
from sbp_launch.checkpoint.steps import step_name
from sbp_launch.settings.config import RunConfig
from sbp_launch.trainer import trainer
from sbp_torch.runtime.reference import ReferenceSession


def config(
    every: int, *, wait: bool = False, steps: int = 4, copy_bytes: int | None = None
) -> RunConfig:
    return run_config(
        (2,),
        ("data",),
        steps=steps,
        checkpoint=CheckpointConfig(every=every, keep=0, wait=wait, copy_bytes=copy_bytes),
        **QUIET,
    )


def saved(folder: Path) -> list[str]:
    return sorted(newest_first(LocalStorage(folder / "checkpoints")))


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Have a function called with the step before a thread writes its checkpoint."""

    def before(call: Callable[[int], None]) -> None:
        write = background.write_part

        def called(staged: Any, rank: int, metadata: Any, pieces: Any) -> int:
            call(metadata.step)
            return write(staged, rank, metadata, pieces)

        monkeypatch.setattr(background, "write_part", called)

    return before


@pytest.mark.slow
def test_what_is_written_while_steps_go_on_is_what_steps_would_wait_for(tmp_path: Path) -> None:
    for wait in (False, True):
        trainer.train(config(1, wait=wait), registry(), tmp_path / str(wait))

    assert saved(tmp_path / "False") == [step_name(step) for step in (1, 2, 3, 4)]
    for name in saved(tmp_path / "False"):
        with (
            Checkpoint(LocalStorage(tmp_path / "False" / "checkpoints"), name) as one,
            Checkpoint(LocalStorage(tmp_path / "True" / "checkpoints"), name) as other,
        ):
            one.verify()
            assert one.keys() == other.keys() and one.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
            found, wanted = one.manifest.metadata, other.manifest.metadata
            assert (found.step, found.cursor) == (wanted.step, wanted.cursor)


@pytest.mark.slow
def test_copies_take_no_more_than_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    take = ReferenceSession.snapshot

    def taken(session: ReferenceSession, *, limit_bytes: int | None) -> Snapshot:
        limits.append(limit_bytes)
        return take(session, limit_bytes=limit_bytes)

    monkeypatch.setattr(ReferenceSession, "snapshot", taken)
    trainer.train(config(1, steps=2, copy_bytes=1000), registry(), tmp_path)

    assert limits == [1000]
    assert CheckpointConfig().copy_bytes == 240 * 2**20


def test_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="copy_bytes=-1 is too small"):
        CheckpointConfig(copy_bytes=-1)


@pytest.mark.slow
def test_steps_go_on_while_a_checkpoint_is_written_and_the_end_waits_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writing: Callable[[Callable[[int], None]], None],
) -> None:
    all_taken = threading.Event()
    writing(lambda _: assert_set(all_taken))
    at = trainer.save_states

    def at_the_end(*given: Any) -> None:
        all_taken.set()
        at(*given)

    monkeypatch.setattr(trainer, "save_states", at_the_end)
    trainer.train(config(2), registry(), tmp_path)

    assert saved(tmp_path) == [step_name(2), step_name(4)]


def assert_set(event: threading.Event) -> None:
    assert event.wait(20.0)


@pytest.mark.slow
def test_a_save_waits_for_the_one_before_it_and_says_so(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    writing: Callable[[Callable[[int], None]], None],
) -> None:
    may_write = threading.Event()
    writing(lambda _: assert_set(may_write))
    finish = background.BackgroundSave.finish

    def finishing(self: background.BackgroundSave) -> None:
        may_write.set()
        finish(self)

    monkeypatch.setattr(background.BackgroundSave, "finish", finishing)
    trainer.train(config(1), registry(), tmp_path)

    out = capsys.readouterr().out
    assert "step 2/4  waiting until checkpoints/step-00000001 is there" in out
    assert saved(tmp_path) == [step_name(step) for step in (1, 2, 3, 4)]


@pytest.mark.slow
def test_what_cannot_be_written_ends_the_run_and_leaves_what_is_there(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    writing: Callable[[Callable[[int], None]], None],
) -> None:
    def fails(step: int) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")

    writing(fails)
    with pytest.raises(RunError, match="step-00000002 cannot be written: No space left"):
        trainer.train(config(1, steps=50), registry(), tmp_path)

    assert "stopped early; the states so far are in checkpoints/step-" in capsys.readouterr().out
    first, *_, last = saved(tmp_path)
    assert first == step_name(1)
    assert step_name(2) < last < step_name(50)
    for name in (first, last):
        with Checkpoint(LocalStorage(tmp_path / "checkpoints"), name) as found:
            found.verify()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("problem", [OSError(28, "No space left on device"), SystemExit(4)])
def test_what_could_not_be_written_at_the_end_is_told_and_the_last_step_is_saved(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    writing: Callable[[Callable[[int], None]], None],
    problem: BaseException,
) -> None:
    ended = threading.Event()

    def fails(step: int) -> None:
        assert_set(ended)
        raise problem

    writing(fails)
    with pytest.MonkeyPatch.context() as patch:
        at = trainer.save_states
        patch.setattr(trainer, "save_states", lambda *given: (ended.set(), at(*given)))
        trainer.train(config(3), registry(), tmp_path)

    assert saved(tmp_path) == [step_name(4)]
    assert "step-00000003 is not saved: " in caplog.text
