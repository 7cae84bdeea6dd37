"""Files with random edits: used, or refused by an error of ours that names the place.

`python -m fuzz` in `integration` tries a million of them, in processes that are watched, and what
other packages read.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.testing import fuzz
from sbp_core.testing.edits import edited_bytes
from sbp_core.testing.files import KINDS
from sbp_core.testing.fuzz import FileKind, edited_file, try_edit


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_nobody_edited_is_used(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    for index, data in enumerate(kind.originals()):
        path = tmp_path / f"{index}{kind.suffix}"
        path.write_bytes(data)

        kind.use(path)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", KINDS)
def test_an_edited_file_is_used_or_refused(name: str, tmp_path: Path) -> None:
    found = [try_edit(KINDS[name], seed, tmp_path) for seed in range(150)]

    assert [outcome for outcome in found if outcome.fault] == []
    assert {"", found[0].error or found[1].error} <= {outcome.error for outcome in found}


def test_an_edit_is_a_function_of_its_seed() -> None:
    kind = KINDS["cluster"]

    files = [edited_file(kind, seed) for seed in (1, 2, 1)]

    assert files[0] == files[2] != files[1]


def kind_that(use: object) -> FileKind:
    return FileKind(name="x", suffix=".json", originals=lambda: [b'{"a": [1]}'], use=use)  # type: ignore[arg-type]


def test_an_error_of_python_is_a_fault_and_ours_is_none(tmp_path: Path) -> None:
    def raw(path: Path) -> None:
        raise KeyError(path)

    def ours(path: Path) -> None:
        raise SbpValueError("it is wrong", where=str(path))

    assert "KeyError" in try_edit(kind_that(raw), 0, tmp_path).fault
    assert try_edit(kind_that(ours), 0, tmp_path).error == "SbpValueError"
    assert try_edit(kind_that(ours), 0, tmp_path).fault == ""
    assert try_edit(kind_that(lambda _: None), 0, tmp_path).error == ""


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (SbpError("it is wrong"), "names no place"),
        (SbpError("", where="here"), "says nothing"),
        (SbpError("\ud800", where="here"), "cannot be printed"),
        (SbpError("x" * 200_000, where="here"), "has 200010 letters"),
    ],
)
def test_a_refusal_that_helps_nobody_is_a_fault(error: SbpError, what: str, tmp_path: Path) -> None:
    def use(path: Path) -> None:
        raise error

    assert what in try_edit(kind_that(use), 0, tmp_path).fault


def test_a_reader_that_takes_too_long_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "MOST_S", -1.0)

    assert "took 0.0 s" in try_edit(kind_that(lambda _: None), 0, tmp_path).fault


def test_bytes_are_edited_in_every_way() -> None:
    data, random = bytes(range(256)) * 40, Random(0)

    found = [edited_bytes(data, random) for _ in range(500)]

    assert any(len(one) == len(data) for one in found)
    assert any(len(one) < len(data) // 2 for one in found)
    assert any(len(one) > len(data) for one in found)
    assert all(isinstance(edited_bytes(b"", random), bytes) for _ in range(100))
