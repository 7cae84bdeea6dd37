from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from sbp_core.compile.depends import SourceFile, changed, loaded_sources, package_digest


def test_loaded_files_are_found_but_not_those_of_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_helper_of_mine.py").write_text("X = 1\n")
    module = importlib.import_module("a_helper_of_mine")

    paths = {file.path for file in loaded_sources(without=["sbp_core"])}
    monkeypatch.delitem(sys.modules, "a_helper_of_mine")

    assert module.__file__ in paths
    assert pytest.__file__ in paths
    assert json.__file__ not in paths
    assert not any("/sbp_core/" in path for path in paths)


def test_the_file_that_has_changed_is_named(tmp_path: Path) -> None:
    first, second = tmp_path / "a.py", tmp_path / "b.so"
    first.write_text("1")
    second.write_bytes(b"1")
    files = [SourceFile.read(str(path)) for path in (first, second)]
    nothing = changed(files)

    second.write_bytes(b"12")

    assert (nothing, changed(files)) == ("", str(second))


def test_a_file_that_is_gone_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("")
    file = SourceFile.read(str(path))

    path.unlink()

    assert changed([file]) == str(path)
    assert changed([SourceFile.read(str(path))]) == ""


def test_a_package_has_another_digest_after_each_change(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "a.py"
    digests = []
    for change in (lambda: path.write_text("1"), lambda: path.write_text("2"),
                   lambda: path.rename(tmp_path / "b.py")):  # fmt: skip
        change()
        digests.append(package_digest(tmp_path))

    assert len(set(digests)) == 3
    assert package_digest(tmp_path) == digests[-1]
