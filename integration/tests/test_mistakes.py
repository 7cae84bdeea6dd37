"""Ordinary mistakes are answered with the key or the file, and with what to do; exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import can_fork
from mistakes.files import prepare
from mistakes.table import MISTAKES
from mistakes.trial import APP, make, make_in_fork, make_without_torch
from sbp_core.testing.forked_programs import ForkedPrograms


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that can be mistaken."""
    made = tmp_path_factory.mktemp("mistakes")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedPrograms]:
    """What runs commands in processes without PyTorch."""
    found = ForkedPrograms(APP)
    yield found
    found.close()


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_what_to_do(
    name: str, folder: Path, programs: ForkedPrograms
) -> None:
    mistake = MISTAKES[name]

    if not can_fork():
        answer = make(mistake, folder)
    elif mistake.imports_torch:
        answer = make_in_fork(mistake, folder)
    else:
        answer = make_without_torch(mistake, folder, programs)

    assert not answer.faults, f"{answer.faults}\n{answer.text}"
