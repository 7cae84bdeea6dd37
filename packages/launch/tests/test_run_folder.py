"""The folder of a run: new, writable, and never that of an earlier run without a word."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from toys import Outcome
from trainable import registry, run_config

from sbp_core.errors import ConfigError, RunError
from sbp_launch.run.environment import ENVIRONMENT
from sbp_launch.run.folder import RUN_FILES, check_unused, make_folder, take_folder, writing
from sbp_launch.trainer import trainer

App = Callable[..., Outcome]


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make_folder, [tmp_path / "runs" / "now"] * 20))

    assert len(set(made)) == 20
    assert {path.name for path in made} == {"now", *(f"now_{number}" for number in range(2, 21))}
    assert all(list(path.iterdir()) == [] for path in made)


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_folder_with_a_run_is_refused_unless_it_may_be_replaced(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("of an earlier run")

    with pytest.raises(ConfigError, match=f"holds an earlier run: {name}") as caught:
        take_folder(tmp_path, overwrite=False)

    assert "trainer.overwrite=true" in caught.value.todo
    take_folder(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_folder_with_other_files_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")

    take_folder(tmp_path, overwrite=False)
    take_folder(tmp_path / "deep" / "er", overwrite=False)

    assert (tmp_path / "deep" / "er").is_dir()


@pytest.mark.slow
def test_what_a_run_leaves_makes_its_folder_a_used_one(tmp_path: Path) -> None:
    trainer.train(run_config(), registry(), tmp_path)

    assert {path.name for path in tmp_path.iterdir()} <= {*RUN_FILES, ENVIRONMENT}
    with pytest.raises(ConfigError, match="holds an earlier run"):
        check_unused(tmp_path, overwrite=False)


@pytest.mark.parametrize("take", [make_folder, lambda path: take_folder(path, overwrite=True)])
@pytest.mark.parametrize("below", ["file/run", "file/deep/run"])
def test_a_file_in_the_way_is_named(
    tmp_path: Path, take: Callable[[Path], object], below: str
) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ConfigError, match=r"/file is a file") as caught:
        take(tmp_path / below)

    assert "hydra.run.dir" in caught.value.todo


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")]
)
def test_a_folder_in_which_nothing_can_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(**given: object) -> None:
        raise error

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    with pytest.raises(ConfigError, match=str(error.strerror)):
        take_folder(tmp_path / "run", overwrite=False)
    with pytest.raises(ConfigError, match=str(error.strerror)):
        make_folder(tmp_path / "other")


def test_a_disk_that_fills_up_is_named_with_the_file(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device", "plan.json")

    with pytest.raises(RunError, match="written: No space left") as caught, writing(tmp_path):
        raise full

    assert caught.value.where == ("plan.json",)


@pytest.mark.slow
def test_the_app_refuses_a_used_folder_before_torch_is_loaded(app: App, tmp_path: Path) -> None:
    used = tmp_path / "used"
    used.mkdir()
    (used / "checkpoints").mkdir()
    (used / "checkpoints" / "step-00000001").write_bytes(b"precious")

    refused = app(f"hydra.run.dir={used}", overwrites=True)
    replaced = app(f"hydra.run.dir={used}", "trainer.overwrite=true", overwrites=True)
    swept = app(
        "-m",
        f"hydra.sweep.dir={tmp_path}",
        "hydra.sweep.subdir=used",
        "trainer.steps=1,2",
        overwrites=True,
    )

    assert (refused.code, replaced.code, swept.code) == (2, 0, 2)
    assert f"the run folder {used} holds an earlier run: checkpoints" in refused.err
    assert f"the run folder {used} holds an earlier run: checkpoints" in swept.err
    assert "Traceback" not in refused.err + swept.err
    assert not refused.torch
    assert (used / "checkpoints" / "step-00000001").read_bytes() == b"precious"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["it\\'s = [new]", "a b,c", "a: {b}"])
def test_the_folder_of_a_run_may_have_any_name(app: App, name: str) -> None:
    outcome = app(f"hydra.run.dir='${{now:%Y}} {name}'", overwrites=True)

    assert outcome.code == 0, outcome.err
    folder = Path(json.loads(outcome.out)["run_folder"])
    assert (folder / ".hydra" / "config.yaml").is_file()
    assert outcome.made == [folder.name]


@pytest.mark.slow
def test_what_is_only_shown_or_refused_makes_no_folder(app: App) -> None:
    outcomes = [
        app("--cfg", "job", overwrites=True),
        app("--info", "searchpath", overwrites=True),
        app("trainer.steps=0", overwrites=True),
        app("-m", "trainer.steps=5,0", overwrites=True),
        app("--help", overwrites=True),
    ]

    assert [outcome.code for outcome in outcomes] == [0, 0, 2, 2, 0]
    assert outcomes[0].made == []


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("folder", ["run", "'${now:%Y} run'"])
def test_a_run_that_is_refused_before_it_begins_leaves_nothing(app: App, folder: str) -> None:
    outcome = app(f"hydra.run.dir={folder}", overwrites=True, refuse="early")

    assert outcome.code == 2
    assert "it goes on in other data" in outcome.err
    assert outcome.made == []


@pytest.mark.slow
def test_what_refused_settings_would_have_replaced_stays(app: App, tmp_path: Path) -> None:
    going_on = "trainer.overwrite=true"
    run = app("trainer.steps=7", "hydra.run.dir=run", overwrites=True).folder / "run"
    (run / "metrics.jsonl").write_text("of the run")
    (run / "environment.json").write_text("of the run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    outcome = app("trainer.steps=9", going_on, "hydra.run.dir=run", overwrites=True, refuse="early")

    assert outcome.code == 2
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert b"trainer.steps=7" in before[run / ".hydra" / "overrides.yaml"]


@pytest.mark.slow
def test_a_run_that_had_begun_keeps_its_settings(app: App) -> None:
    failed = app("hydra.run.dir=failed", overwrites=True, fail=True)
    planned = app("hydra.run.dir=planned", overwrites=True, refuse="late")

    assert (failed.code, planned.code) == (1, 2)
    for name in ("failed", "planned"):
        assert (planned.folder / name / "config.yaml").is_file()
