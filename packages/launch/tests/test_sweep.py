"""The table of the runs of --multirun, at the widths of terminals and files."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
from trainable import registry, run_config

from sbp_core.errors import SbpError
from sbp_launch.apps.sweep import SweepJob, SweepNotes, objective, print_sweep
from sbp_launch.console import make_console
from sbp_launch.run.result import RunResult, read_result, write_result
from sbp_launch.settings.config import EvaluateConfig
from sbp_launch.trainer import trainer


def result(**changes: object) -> RunResult:
    known = {
        "step": 100,
        "samples": 1600,
        "tokens": 0,
        "epoch": 1,
        "train_s": 5.0,
        "unit": "samples",
    }
    return RunResult(**{**known, **changes})  # type: ignore[arg-type]


def jobs(folder: Path) -> list[SweepJob]:
    """Return three runs: a good one, one that diverged, and one that did not begin."""
    found = [result(loss=2.5, held_out_loss=2.75, best=2.6, best_step=80, rate=14452.3, mfu=0.1)]
    diverged = "the loss is nan [of step 3]\n  in step 3 of 100"
    found += [result(step=3, loss=math.nan, rate=None, failure=diverged)]
    made = []
    for number, rate in enumerate(("0.001", "0.1", "-1")):
        place = folder / str(number)
        place.mkdir()
        if number < len(found):
            write_result(place, found[number])
        failure = "" if number == 0 else f"it failed [as {number} does]"
        overrides = ("trainer.steps=100", f"optimizer.lr={rate}")
        made.append(SweepJob(number=number, overrides=overrides, folder=place, failure=failure))
    return made


def printed(made: list[SweepJob], width: int) -> list[str]:
    out = io.StringIO()
    print_sweep(made, make_console(width, file=out))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_each_run_has_a_row_with_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)

    lines = printed(jobs(tmp_path), 100)

    words = [line.split() for line in lines]
    assert lines[1] == f"the runs of {tmp_path.name}:"
    assert words[2] == [
        "run", "optimizer.lr", "steps", "loss", "held-out", "best", "samples/s", "folder",
    ]  # fmt: skip
    assert words[4] == ["0", "0.001", "100", "2.5000", "2.7500", "2.6000", "14,452", "0"]
    assert words[5] == ["1", "0.1", "3", "nan", "1"]
    assert words[6] == ["2", "-1", "2"]
    assert lines[7:] == [
        "run 1 failed: the loss is nan [of step 3]",
        "run 2 failed: it failed [as 2 does]",
    ]


def test_names_in_brackets_are_no_markup_in_the_table(tmp_path: Path) -> None:
    made = [
        replace(job, overrides=(f"cluster.axes=[{axis}]",))
        for job, axis in zip(jobs(tmp_path), ("data", "red", "/tensor"), strict=True)
    ]

    text = "\n".join(printed(made, 100))

    assert re.findall(r"\[\S+\]", text)[:3] == ["[data]", "[red]", "[/tensor]"]


def test_the_lowest_of_several_held_out_losses_is_told_with_its_run(tmp_path: Path) -> None:
    made = jobs(tmp_path)
    write_result(made[2].folder, result(loss=2.0, best=2.25, best_step=90))

    assert printed(made, 100)[-1] == "lowest held-out loss: 2.2500, of run 2"
    assert not any(line.startswith("lowest") for line in printed(made[:2], 100))  # of one


def test_a_sweep_that_was_stopped_in_its_first_run_has_a_row_too(tmp_path: Path) -> None:
    lines = printed(jobs(tmp_path)[:1], 80)

    assert lines[2].split() == ["run", "steps", "loss", "held-out", "best", "samples/s", "folder"]


def test_notes_of_other_processes_are_read_in_the_order_of_the_runs(tmp_path: Path) -> None:
    made = [
        SweepJob(number=number, overrides=(f"x={number}",), folder=tmp_path, failure="it goes on")
        for number in (10, 9, 2)
    ]
    notes = pickle.loads(pickle.dumps(SweepNotes(tmp_path)))
    for job in made:
        notes.write(job)
    notes.write(replace(made[0], failure=""))

    assert SweepNotes(tmp_path).read() == [made[2], made[1], replace(made[0], failure="")]


def test_a_note_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "0.json")

    with pytest.raises(SbpError, match="it is a pipe"):
        SweepNotes(tmp_path).read()


def test_a_job_that_outlasts_its_sweep_has_nobody_to_tell(tmp_path: Path) -> None:
    notes = SweepNotes(tmp_path / "gone")

    notes.write(SweepJob(number=0, overrides=(), folder=tmp_path))

    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_its_width(tmp_path: Path, width: int) -> None:
    lines = printed(jobs(tmp_path), width)

    assert max(map(len, lines[2:])) <= width  # the line with the folder is not broken
    assert any("optimizer.lr" in line for line in lines)


@pytest.mark.slow
def test_a_run_leaves_what_came_of_it_also_if_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(steps=4, evaluate=EvaluateConfig(every=2, batches=1))
    trainer.train(config, registry(), tmp_path / "good")
    monkeypatch.setattr(trainer.TrainingLoop, "_evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(config, registry(), tmp_path / "bad")

    good, bad = (read_result(tmp_path / name) for name in ("good", "bad"))

    assert good is not None and bad is not None
    assert (good.step, good.samples, good.tokens, good.unit) == (4, 16, 64, "tokens")
    assert good.loss and good.held_out_loss and good.rate and good.mfu
    assert objective(tmp_path / "good") == good.best
    rows = [json.loads(line) for line in (tmp_path / "good/metrics.jsonl").read_text().splitlines()]
    best = min((row["held_out_loss"], row["step"]) for row in rows if "held_out_loss" in row)
    assert (good.best, good.best_step) == best
    assert (bad.step, bad.best) == (2, None)
    assert (good.failure, bad.failure) == ("", "ZeroDivisionError: division by zero")
    assert objective(tmp_path / "bad") == bad.loss
    assert objective(tmp_path) is None
