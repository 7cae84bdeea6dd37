import json
import os
import subprocess

import pytest
import torch
from trainable import registry, run_config

from sbp_launch.run.environment import VARIABLES, environment, git_state, write_environment
from sbp_launch.trainer import trainer


def _git(folder, *arguments):
    identity = ("-c", "user.name=one", "-c", "user.email=one@example.org")
    subprocess.run(("git", "-C", folder, *identity, *arguments), check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A working tree with one commit."""
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    _git(folder, "init", "-q", "-b", "main")
    (folder / "model.py").write_text("lr = 1\n")
    _git(folder, "add", "model.py")
    _git(folder, "commit", "-q", "-m", "one")
    return folder


def test_versions_of_python_torch_and_every_plugin_are_recorded():
    record = environment(registry())

    # A build names itself behind the version, such as +cpu; not all of them in their metadata, too.
    assert record["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    plugins = {entry.distribution for entry in registry().entries if entry.version}
    assert plugins <= record["versions"].keys()
    assert record["machine"]["usable_cores"] >= 1


def test_variables_that_are_not_listed_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SERVICE_TOKEN", "wJalrXUtnFEMI")

    write_environment(tmp_path, registry())

    text = (tmp_path / "environment.json").read_text()
    assert json.loads(text)["variables"]["OMP_NUM_THREADS"] == "1"
    assert json.loads(text)["variables"].keys() <= set(VARIABLES)
    assert "SERVICE_TOKEN" not in text
    assert "wJalrXUtnFEMI" not in text


def test_a_clean_tree_is_its_commit(tree):
    state = git_state(tree)

    assert len(state["commit"]) == 40
    assert (state["branch"], state["is_dirty"], state["changed"]) == ("main", False, [])


def test_of_a_changed_tree_the_changes_are_named_below_its_folders_too(tree):
    (tree / "model.py").write_text("lr = 2\n")
    (tree / "part").mkdir()
    (tree / "part" / "new.py").write_text("")

    state = git_state(tree / "part")

    assert state["is_dirty"]
    assert [line.split()[-1] for line in state["changed"]] == ["../model.py", "./"]


def test_a_tree_without_a_commit_has_none(tmp_path):
    _git(tmp_path, "init", "-q")

    assert git_state(tmp_path)["commit"] is None


def test_outside_of_git_and_without_git_there_is_no_state(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state(tmp_path) is None

    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tree) is None


def test_a_run_records_its_environment_before_it_captures(tmp_path, monkeypatch):
    def fail(run):
        raise RuntimeError("no program")

    monkeypatch.setattr(trainer, "make_program", fail)

    with pytest.raises(RuntimeError, match="no program"):
        trainer.train(run_config(), registry(), tmp_path)

    assert json.loads((tmp_path / "environment.json").read_text())["python"]
