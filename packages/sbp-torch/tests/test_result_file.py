from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from sbp_torch.result_file import ResultFile


def _file(folder: Path, *, budget: float = 1, key: str = "key") -> ResultFile[list[Any]]:
    """Return the place of a list, which was cut short if it ends in None."""
    return ResultFile(
        path=folder / "one.json",
        key=key,
        budget=budget,
        what="lists",
        dump=lambda found: {"list": found},
        load=lambda value: list(value["list"]),
        is_whole=lambda found: found[-1] is not None,
    )


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    _file(tmp_path / "new").write([1, 2])

    assert _file(tmp_path / "new").read() == [1, 2]
    assert _file(tmp_path / "new", key="another").read() is None
    assert _file(tmp_path).read() is None


def test_a_result_that_was_cut_short_serves_no_larger_budget(tmp_path: Path) -> None:
    _file(tmp_path, budget=3).write([1, None])

    assert _file(tmp_path, budget=3).read() == [1, None]
    assert _file(tmp_path, budget=4).read() is None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"key": "key"}',
        '{"key": "key", "key": "key"}',
        '{"key": "key", "found": 1, "budget": 1}',
        "[" * 100_000,
    ],
)
def test_what_cannot_be_read_is_logged_and_written_again(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = _file(tmp_path)
    file.path.write_text(text)

    with caplog.at_level(logging.WARNING):
        assert file.read() is None

    assert "ignoring lists in" in caplog.text
    file.write([1])
    assert file.read() == [1] and [*tmp_path.iterdir()] == [file.path]


def test_what_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").touch()

    _file(tmp_path / "taken").write([1])

    assert "lists are not kept in" in caplog.text


@pytest.mark.parametrize("damage", ["pipe", "too large"])
def test_what_would_hang_or_fill_memory_is_no_result(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = _file(tmp_path)
    if damage == "pipe":
        os.mkfifo(file.path)
    else:
        with file.path.open("wb") as opened:
            opened.truncate(2**42)  # of which nothing is on the disk

    with caplog.at_level(logging.WARNING):
        assert file.read() is None

    assert f"in {file.path}" in caplog.text
