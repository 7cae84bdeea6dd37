"""`~` in the paths of runs and checkpoints: one folder, and one refusal, for all doors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from saved_states import save_whole

from sbp_core.errors import ConfigError
from sbp_launch.apps.train import expand_resume
from sbp_launch.checkpoint.command.convert import _file
from sbp_launch.checkpoint.places import find_checkpoints, look, place_of_checkpoint
from sbp_launch.step.saved import as_path

DOORS: dict[str, Callable[[str], object]] = {
    "resume=": lambda path: expand_resume([f"resume={path}"]),
    "trainer.resume": find_checkpoints,
    "sbp-checkpoint": look,
    "sbp-checkpoint convert": lambda path: place_of_checkpoint(path, 3),
    "sbp-checkpoint convert --to hf": lambda path: _file(
        SimpleNamespace(target=path, overwrite=False), look(Path.cwd()), "hf", 1
    ),
    "step.save": lambda path: as_path(path, "step.save"),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_home_folder_that_is_not_known_is_refused_in_the_same_words(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_whole(tmp_path, "step-00000009")

    with pytest.raises(ConfigError) as refused:
        DOORS[door]("~nobodyhere/x")

    named = "resume=" * (door == "resume=")
    said = f"{named}~nobodyhere/x: the home folder of ~ is not known"
    assert refused.value.what == said
    assert refused.value.todo == "write the whole path"
    assert refused.value.where == (("step.save",) if door == "step.save" else ())


def test_a_checkpoint_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_whole(tmp_path / "run" / "checkpoints", "step-00000009")

    storage, names = find_checkpoints("~/run")

    assert (storage.place(names[0]), names) == (look("~/run").place, ["step-00000009"])
    assert Path(look("~/run").place).is_relative_to(tmp_path)
    with pytest.raises(ConfigError, match=f"in {tmp_path}/run"):  # which has no settings
        expand_resume(["resume=~/run"])
