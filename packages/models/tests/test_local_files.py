import os
import sys
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_models import local_files
from sbp_models.extras import library
from sbp_models.local_files import files_of, is_held_out, read_bytes
from sbp_models.text_files import pieces


def test_files_of_a_folder_come_by_name_without_hidden_ones(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a/x.TXT", ".git/c.txt", "b/.d.txt", "e.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x" * (9 if "1" in name else 1))  # names are no sizes

    found = files_of(tmp_path, key="data.path", suffixes={".txt"})

    assert [file.relative_to(tmp_path).as_posix() for file in found] == [
        "a/x.TXT",
        "b/1.txt",
        "b/2.txt",
    ]
    assert files_of(tmp_path / "e.md", key="data.path", suffixes={".txt"}) == [tmp_path / "e.md"]


def test_what_is_not_there_is_refused_by_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path=.*no does not exist"):
        files_of(tmp_path / "no", key="data.path")
    with pytest.raises(ConfigError, match=r"holds no \*\.csv, \*\.parquet"):
        files_of(tmp_path, key="data.path", suffixes={".parquet", ".csv"})
    with pytest.raises(ConfigError, match=r"data\.x=.* cannot be read: it is a folder"):
        read_bytes(tmp_path, key="data.x")


def test_about_the_part_that_is_asked_for_is_held_out() -> None:
    held = [is_held_out(f"image {number}", 0.25) for number in range(4000)]

    assert sum(held) == pytest.approx(1000, abs=120)
    assert not any(is_held_out(f"{number}", 0.0) for number in range(100))


def test_a_library_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(ConfigError, match="data=tokens needs tokenizers") as caught:
        library("tokenizers", extra="tokens", needed_by="data=tokens")

    assert caught.value.todo == 'pip install "sbp-models[tokens]"'


@pytest.mark.parametrize("kind", ["pipe", "link to a device", "too large"])
def test_what_would_hang_or_fill_memory_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(local_files, "MOST_BYTES", 9)
    path = tmp_path / "x.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "too large":
        path.write_bytes(bytes(10))
    else:
        path.symlink_to("/dev/zero")

    with pytest.raises(ConfigError, match=r"x\.png cannot be read: it (is a|has 10 bytes)"):
        read_bytes(path)


@pytest.mark.parametrize("ending", [".txt", ".jsonl"])
def test_pieces_of_a_pipe_are_refused(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"x{ending}"
    os.mkfifo(path)

    with pytest.raises(ConfigError, match="it is a pipe"):
        list(pieces([path], field="text"))
