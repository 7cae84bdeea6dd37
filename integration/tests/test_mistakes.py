"""Ordinary mistakes are answered with the key or the file, and with what to do; exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked import can_fork
from mistakes.files import prepare
from mistakes.table import MISTAKES
from mistakes.trial import make, make_in_fork


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that can be mistaken."""
    made = tmp_path_factory.mktemp("mistakes")
    prepare(made)
    return made


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_what_to_do(name: str, folder: Path) -> None:
    mistake = MISTAKES[name]

    # What is to be seen without PyTorch takes a process that has not imported it.
    make_it = make_in_fork if mistake.imports_torch and can_fork() else make
    answer = make_it(mistake, folder)

    assert not answer.faults, f"{answer.faults}\n{answer.text}"
