"""What Ctrl-C, SIGTERM and SIGHUP do to a run, whatever it is at."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from saved_states import states_of_run
from trainable import registry, run_config

from sbp_core.errors import RunError
from sbp_core.testing.signals import hears_signals
from sbp_launch.checkpoint import saving
from sbp_launch.metrics.files import JsonlSink
from sbp_launch.run.stopping import StopSignals, Terminated
from sbp_launch.trainer import trainer
from sbp_torch.runtime.reference import ReferenceSession

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    with hears_signals():
        yield


def test_handlers_are_those_from_before_behind_the_block() -> None:
    before = [signal.getsignal(number) for number in (INT, TERM, HUP)]

    with StopSignals():
        inside = [signal.getsignal(number) for number in (INT, TERM, HUP)]

    assert [signal.getsignal(number) for number in (INT, TERM, HUP)] == before
    assert all(one != other for one, other in zip(inside, before, strict=True))


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)  # as `nohup` does
    try:
        with StopSignals():
            signal.raise_signal(HUP)
            inside = signal.getsignal(HUP)
        after = signal.getsignal(HUP)
    finally:
        signal.signal(HUP, before)

    assert (inside, after) == (signal.SIG_IGN, signal.SIG_IGN)


def test_another_thread_than_the_main_one_sets_no_handlers() -> None:
    before, found = signal.getsignal(TERM), []

    def look() -> None:
        with StopSignals():
            found.append(signal.getsignal(TERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()

    assert found == [before]


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (HUP, 129)])
def test_a_signal_stops_at_once_what_is_no_training(number: int, code: int) -> None:
    with pytest.raises(Terminated) as caught, StopSignals():
        signal.raise_signal(number)

    assert caught.value.code == code


def at_step(
    monkeypatch: pytest.MonkeyPatch, number: int, signals: tuple[int, ...], *, inside: bool = False
) -> None:
    """Send signals in a step, counted from 1: before it is taken, or in the middle of it."""
    step, taken = ReferenceSession.step, []

    def sending(self: ReferenceSession, *given: object, **named: object) -> object:
        taken.append(None)
        found = None if inside else step(self, *given, **named)
        if len(taken) == number:
            for one in signals:
                signal.raise_signal(one)
        return step(self, *given, **named) if found is None else found

    monkeypatch.setattr(ReferenceSession, "step", sending)


def at_save(monkeypatch: pytest.MonkeyPatch, *signals: int) -> None:
    """Send signals while the states are written."""
    write = saving.write_part

    def sending(*given: object) -> None:
        for one in signals:
            signal.raise_signal(one)
        write(*given)

    monkeypatch.setattr(saving, "write_part", sending)


def steps_saved(folder: Path) -> float | None:
    """Return how many steps the saved states have taken; None if there are none."""
    assert not list((folder / "checkpoints").glob(".step*"))
    states = states_of_run(folder)
    return states["head.weight.step"].item() if states else None


@pytest.mark.parametrize(("number", "code", "name"), [(TERM, 143, "SIGTERM"), (HUP, 129, "SIGHUP")])
def test_a_run_that_is_terminated_ends_its_step_and_saves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: int,
    code: int,
    name: str,
) -> None:
    at_step(monkeypatch, 2, (number,))

    with pytest.raises(Terminated) as caught:
        trainer.train(run_config(steps=5), registry(), tmp_path)

    told = capfd.readouterr()
    assert caught.value.code == code
    assert steps_saved(tmp_path) == 2
    assert f"{name}: stopping after this step" in told.err
    assert f"stopped by {name}; the states so far are in checkpoints/step-00000002" in told.out
    assert f"run folder: {tmp_path}" in told.out
    assert re.search(rf"to continue: sbp-train\s+resume={tmp_path}\n", told.out)


def test_the_second_sigterm_does_not_wait_for_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_step(monkeypatch, 2, (TERM, TERM), inside=True)

    with pytest.raises(Terminated):
        trainer.train(run_config(steps=5), registry(), tmp_path)

    assert steps_saved(tmp_path) == 1


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("in_step", "in_save", "error", "saved"),
    [
        ((INT,), (), KeyboardInterrupt, 2),
        ((INT,), (INT,), KeyboardInterrupt, 2),
        ((INT,), (INT, INT), KeyboardInterrupt, None),
        ((INT,), (TERM, HUP, TERM), KeyboardInterrupt, 2),
        ((TERM,), (INT,), Terminated, 2),
        ((TERM,), (INT, TERM, INT), Terminated, None),
        ((TERM,), (TERM, TERM, TERM), Terminated, 2),
        ((), (INT,), KeyboardInterrupt, 3),
        ((), (INT, INT), KeyboardInterrupt, None),
        ((), (TERM,), Terminated, 3),
        ((), (HUP, TERM, INT), Terminated, 3),
    ],
)
def test_a_save_is_abandoned_by_the_second_ctrl_c_in_it_and_by_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    in_step: tuple[int, ...],
    in_save: tuple[int, ...],
    error: type[BaseException],
    saved: int | None,
) -> None:
    at_step(monkeypatch, 2, in_step)
    at_save(monkeypatch, *in_save)

    with pytest.raises(error):
        trainer.train(run_config(), registry(), tmp_path)

    told = capfd.readouterr()
    assert steps_saved(tmp_path) == saved
    assert ("press Ctrl-C again to abandon them" in told.err) == bool(in_save)
    assert ("abandoned by Ctrl-C: the states are not saved" in told.out) == (saved is None)
    assert "held-out loss" not in told.out


CAUSES: dict[str, Callable[[], BaseException]] = {
    "interrupt": KeyboardInterrupt,
    "failure": lambda: RunError("rank 1 failed"),
    "termination": lambda: Terminated(TERM),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_full_disk_does_not_take_the_place_of_what_ended_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cause: str,
) -> None:
    error = CAUSES[cause]()

    def failing(self: ReferenceSession, *given: object, **named: object) -> object:
        raise error

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ReferenceSession, "step", failing)
    monkeypatch.setattr(saving, "write_part", full)

    with pytest.raises(BaseException) as caught:
        trainer.train(run_config(), registry(), tmp_path)

    assert caught.value is error
    told = capsys.readouterr().out
    assert "the states are not saved: the checkpoint step-00000000 cannot be written: No" in told


def test_a_full_disk_at_the_end_is_the_failure_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "write_part", full)

    with pytest.raises(RunError, match="No space left"):
        trainer.train(run_config(), registry(), tmp_path)

    assert f"run folder: {tmp_path}" in capsys.readouterr().out


def test_metrics_that_cannot_be_written_end_the_run_with_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: JsonlSink, *given: object) -> None:
        self._file.close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(JsonlSink, "log", full)
    monkeypatch.setattr(JsonlSink, "close", full)

    with pytest.raises(RunError, match=r"run folder .* cannot be written: No space left") as caught:
        trainer.train(run_config(), registry(), tmp_path)

    assert "hydra.run.dir" in caught.value.todo
    assert steps_saved(tmp_path) == 1


def test_ctrl_c_waits_for_the_step() -> None:
    with StopSignals() as signals:
        with signals.training():
            signal.raise_signal(INT)
            assert signals.pending_number == INT
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(INT)  # the second one does not
        with signals.saving():
            pass


def test_what_slurm_sends_before_it_takes_the_hosts_away_waits_for_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with StopSignals() as signals, signals.training():
        signal.raise_signal(signal.SIGUSR1)
        assert signals.pending_number == signal.SIGUSR1
        with pytest.raises(Terminated) as caught:
            signals.stop_if_asked()

    assert caught.value.code == 128 + signal.SIGUSR1
