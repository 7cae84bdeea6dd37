"""`sbp-train resume=RUN` stands for the command line of that run, and what is given instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_launch.apps.going_on import going_on


def run_folder(tmp_path: Path, *overrides: str) -> Path:
    folder = tmp_path / "a run"
    (folder / ".hydra").mkdir(parents=True)
    text = "".join(f"- {override}\n" for override in overrides) or "[]\n"
    (folder / ".hydra" / "overrides.yaml").write_text(text, encoding="utf-8")
    return folder


def test_a_command_line_without_it_stays() -> None:
    assert going_on(["-m", "trainer.resume=auto", "x"]) == ["-m", "trainer.resume=auto", "x"]


def test_it_stands_for_the_settings_of_the_run_in_its_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "cluster.mesh=[2]", "model.hidden=64")

    assert going_on([f"resume={folder}"]) == [
        "cluster.mesh=[2]",
        "model.hidden=64",
        "trainer.resume=auto",
        f"hydra.run.dir='{folder}'",
    ]


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ("trainer.steps=40", "trainer.steps=50"),
        ("trainer.steps=40", "trainer.epochs=2"),
        ("+trainer.steps=40", "trainer.steps=50"),
        ("planner=osdp", "planner=infer"),
        ("planner/manual=zero", "planner=infer"),
        ("planner=manual/zero", "planner/manual=data_parallel"),
        ("planner.memory_bytes=7e7", "planner=infer"),
    ],
)
def test_a_setting_that_is_given_counts_instead(tmp_path: Path, own: str, given: str) -> None:
    folder = run_folder(tmp_path, own, "model.hidden=64")

    assert going_on([given, f"resume={folder}"])[:2] == ["model.hidden=64", given]


@pytest.mark.parametrize(
    ("own", "given"),
    [
        ("trainer.batch_size=8", "trainer.steps=50"),
        ("planner=osdp", "planner.memory_bytes=7e7"),
        ("planner=osdp", "plan=x"),
    ],
)
def test_a_setting_of_something_else_stays(tmp_path: Path, own: str, given: str) -> None:
    assert going_on([f"resume={run_folder(tmp_path, own)}", given])[:2] == [own, given]


def test_a_run_that_went_on_itself_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "trainer.resume=/elsewhere", "trainer.steps=4")

    assert going_on([f"resume='{folder}'"]) == [
        "trainer.steps=4",
        "trainer.resume=auto",
        f"hydra.run.dir='{folder}'",
    ]


@pytest.mark.parametrize(
    "other", ["-m", "--multirun", "trainer.resume=auto", "hydra.run.dir=x", "resume=another"]
)
def test_what_says_otherwise_is_refused(tmp_path: Path, other: str) -> None:
    with pytest.raises(ConfigError, match="resume") as refused:
        going_on([f"resume={run_folder(tmp_path)}", other])
    assert other in str(refused.value)


def test_a_simple_folder_is_not_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder(tmp_path).rename(tmp_path / "run-1")
    monkeypatch.chdir(tmp_path)

    assert going_on(["resume=run-1"])[-1] == "hydra.run.dir=run-1"


@pytest.mark.parametrize("text", ["{a: b}", "[1]", "[", "x"])
def test_a_folder_without_the_settings_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    folder = run_folder(tmp_path)
    (folder / ".hydra" / "overrides.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError) as refused:
        going_on([f"resume={folder}"])
    assert str(folder) in str(refused.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to go on with"):
        going_on([f"resume={tmp_path / 'x'}"])
