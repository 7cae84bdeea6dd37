"""What `cold` makes of the README and of the variables; `nox -s cold` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cold

README = (cold.ROOT / "README.md").read_text("utf-8")


def test_the_commands_are_those_of_the_readme() -> None:
    train, settings = cold.command_of(README, "train")
    tests, _ = cold.command_of(README, "tests")

    assert f"\n$ {train}\n" in README
    assert train.startswith("python3 -m pip install nox && ")
    assert tests == train.replace("-s train", "-s tests")
    assert "trainer.steps=3" in settings


def test_a_readme_without_the_command_is_refused() -> None:
    with pytest.raises(ValueError, match="nox -s train"):
        cold.command_of("```console\n$ make\n```\n", "train")


def test_a_new_machine_knows_where_packages_come_from_and_nothing_else(tmp_path: Path) -> None:
    outer = {
        "HOME": "/home/me",
        "PATH": "/usr/bin",
        "PIP_FIND_LINKS": "/wheels",
        "PYTHONPATH": "/src",
        "VIRTUAL_ENV": "/home/me/.venv",
        "XDG_CACHE_HOME": "/home/me/.cache",
    }

    assert cold.variables(outer, tmp_path) == {
        "HOME": str(tmp_path / "home"),
        "PATH": f"{tmp_path}/venv/bin:/usr/bin",
        "PIP_CONFIG_FILE": "/home/me/.config/pip/pip.conf",
        "PIP_FIND_LINKS": "/wheels",
        "PIP_NO_CACHE_DIR": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def test_pip_variables_of_the_user_go_before_ours(tmp_path: Path) -> None:
    outer = {"HOME": "/home/me", "PATH": "", "PIP_CONFIG_FILE": "/etc/mine.conf"}

    assert cold.variables(outer, tmp_path)["PIP_CONFIG_FILE"] == "/etc/mine.conf"


@pytest.mark.slow
def test_a_new_environment_has_nothing_but_python() -> None:
    with cold.new_machine(sys.executable) as (folder, environment):
        names = {
            path.name.split("-")[0] for path in folder.glob("venv/lib/*/site-packages/*.dist*")
        }

        assert names <= {"pip", "setuptools"}
        assert Path(environment["HOME"]).parent == folder

    assert not folder.exists()


def test_a_python_that_is_not_there_or_does_not_run_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = tmp_path / "python3.98"  # a name that pyenv lends, but for no version that is installed
    lent.write_text("#!/bin/sh\nexit 127\n")
    lent.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert cold.find_python("3.98") is None
    assert cold.find_python("3.99") is None


def test_a_named_python_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cold.main(["train", "--torch", "torch==2.13.0", "3.99"]) == 1

    assert capsys.readouterr().out == "Python 3.99: missing\n"
