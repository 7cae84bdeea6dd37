"""Links, files and folders that lie where a run writes, and lead to what belongs to somebody."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from held import Held
from saved_states import STATES, pieces_of

from sbp_core.errors import ConfigError, RunError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.formats.writers import (
    write_distributed_checkpoint,
    write_safetensors,
    write_sharded,
)
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.places import newest_first
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes, save
from sbp_launch.metrics.files import JsonlSink
from sbp_launch.run.folder import LOGS, FolderBefore, take_folder

PIECES = pieces_of(STATES, Placement([0], ("rank",)), NdSbp(B))[0]

NAME = "step-00000001"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of the user's, with a file."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.txt").write_text("words")
    (folder / "manifest.json").write_text("mine")
    return folder


def is_untouched(home: Path) -> bool:
    return {path.name: path.read_text() for path in home.iterdir()} == {
        "thesis.txt": "words",
        "manifest.json": "mine",
    }


def save_one(storage: LocalStorage) -> None:
    save(storage, NAME, Metadata(step=1, seed=0), PIECES, Processes())


@pytest.mark.parametrize("claims", [True, False])
@pytest.mark.parametrize(
    "planted", [f".{NAME}.part", f".{NAME}.old", f".{NAME}.gone", ".step-00000007.part", ".lock"]
)
def test_a_checkpoint_is_saved_without_following_a_link(
    tmp_path: Path, home: Path, planted: str, claims: bool
) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    storage.make()
    save_one(storage)
    target = home / "thesis.txt" if planted == ".lock" else home
    (tmp_path / "checkpoints" / planted).symlink_to(target)

    if claims:
        with storage.claim():
            save_one(storage)
            storage.remove(NAME)
            save_one(storage)
        left = {NAME, ".lock"}
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == left
    else:
        save_one(storage)

    assert is_untouched(home)
    assert newest_first(storage) == [NAME]
    with Checkpoint(storage, NAME) as checkpoint:
        checkpoint.verify()


@pytest.mark.parametrize("kind", ["folder", "folder in it", "file", "link", "link to nothing"])
def test_what_is_no_checkpoint_is_not_replaced_by_one(
    tmp_path: Path, home: Path, kind: str
) -> None:
    storage = LocalStorage(tmp_path / "checkpoints")
    storage.make()
    target = tmp_path / "checkpoints" / NAME
    if kind == "file":
        target.write_text("words")
    elif kind == "link":
        target.symlink_to(home)
    elif kind == "link to nothing":
        target.symlink_to(tmp_path / "nothing")
    else:
        target.mkdir()
        (target / "rank-00000.safetensors").write_text("tensors")
        if kind == "folder in it":
            (target / "manifest.json").write_text("of an app")
            (target / "photos").mkdir()
        else:
            (target / "thesis.txt").write_text("words")
    before = os.lstat(target)

    with pytest.raises(RunError, match="is not a checkpoint, and is not replaced") as caught:
        save_one(storage)

    assert NAME in str(caught.value)
    assert os.path.samestat(os.lstat(target), before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [NAME]
    assert is_untouched(home)


def test_what_a_kill_has_left_of_a_checkpoint_that_was_removed_is_replaced(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    save_one(storage)
    (tmp_path / NAME / "manifest.json").unlink()
    assert newest_first(storage) == []

    save_one(storage)

    assert newest_first(storage) == [NAME]


def test_a_hidden_folder_of_somebody_else_stays(tmp_path: Path) -> None:
    (tmp_path / ".downloads.part").mkdir()

    with LocalStorage(tmp_path).claim():
        pass

    assert (tmp_path / ".downloads.part").is_dir()


@pytest.mark.parametrize(
    "write",
    [
        lambda folder, states: write_safetensors(folder / "x.safetensors", states),
        lambda folder, states: write_sharded(folder, states, 10**9),
        lambda folder, states: write_distributed_checkpoint(folder / "x", states),
        lambda folder, states: JsonlSink(folder / "metrics.jsonl").close(),
    ],
)
def test_names_beside_a_file_are_not_foreseen(
    tmp_path: Path, home: Path, write: Callable[[Path, Held], None]
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    planted = ("x.safetensors.part", ".weights.part", ".x.part", "metrics.jsonl.part")
    for name in planted:
        (folder / name).symlink_to(home / "thesis.txt" if name[0] != "." else home)

    write(folder, Held(x=torch.ones(3)))

    assert is_untouched(home)
    assert all((folder / name).is_symlink() for name in planted)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", f"{LOGS}/rank_0.txt", "logs"])
def test_a_run_folder_with_links_is_refused(tmp_path: Path, home: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(home / "thesis.txt" if "." in name else home)

    with pytest.raises(ConfigError, match=f"has links.*{name} -> {home}"):
        take_folder(run, overwrite=True)

    assert is_untouched(home)


@pytest.mark.parametrize("name", ["metrics.jsonl", ".hydra/config.yaml", f"{LOGS}/rank_0.txt"])
def test_a_run_folder_with_pipes_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    FolderBefore.of(tmp_path)

    with pytest.raises(ConfigError, match=f"{name} is a pipe"):
        take_folder(tmp_path, overwrite=True)


def test_a_run_folder_with_a_file_that_never_ends_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.yaml").open("wb") as file:
        file.truncate(2**42)  # of which nothing is on the disk

    with pytest.raises(ConfigError, match=r"the file is too large: 4\.4 TB"):
        FolderBefore.of(tmp_path)


def test_checkpoints_of_a_run_may_lie_elsewhere(tmp_path: Path, home: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(home)

    take_folder(tmp_path / "run", overwrite=True)
