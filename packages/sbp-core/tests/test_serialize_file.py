from __future__ import annotations

import os
import socket
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.serialize import (
    MOST_BYTES,
    Document,
    file_within,
    open_file,
    parse,
    read_bytes,
    read_text,
)
from sbp_core.strategy import STRATEGY


def test_a_file_is_read_up_to_its_size(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1234")

    assert read_bytes(path, most_bytes=4) == b"1234"
    with pytest.raises(ConfigError, match="too large: 4 B") as refused:
        read_bytes(path, most_bytes=2, error=ConfigError)
    assert refused.value.where == (str(path),)
    assert refused.value.accepted == "at most 2 B"


def test_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole

    tracemalloc.start()
    try:
        with pytest.raises(SbpValueError, match="too large"):
            STRATEGY.read(path)
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket", "a device"])
def test_what_is_no_file_is_not_waited_for(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    path, sock = Path("a"), socket.socket(socket.AF_UNIX)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        sock.bind(str(path))
    else:
        path.symlink_to("/dev/zero")

    # A socket cannot be opened, which the system says itself.
    what = "cannot be read" if kind == "a socket" else f"it is {kind}"
    with sock, pytest.raises(SbpValueError, match=what):
        read_text(path)


def test_a_file_of_the_kernel_says_that_it_is_empty_and_is_read() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("this system has no /proc")

    assert "Pid:" in read_text(path)
    with pytest.raises(SbpValueError, match="too large"):
        read_text(path, most_bytes=10)


def test_lines_end_as_they_do_on_any_system(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"1\r2\r\n3\n")

    assert read_text(path) == "1\n2\n3\n"


def test_nothing_stays_open(tmp_path: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))

    with pytest.raises(SbpValueError):
        read_bytes(tmp_path)

    assert len(list(Path("/dev/fd").iterdir())) == before


def test_a_file_within_a_folder_may_be_deeper_or_a_link(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_text("x")
    (tmp_path / "link").symlink_to("deep/a")

    assert file_within(tmp_path, "deep/a") == tmp_path / "deep" / "a"
    assert file_within(tmp_path, "link").read_text() == "x"
    assert file_within(tmp_path, "is not there yet")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../../b",
        "/etc/passwd",
        "//a",
        "a\0",
        "..\\a",
        "C:a",
        "\ud800",
        "x" * 300,
    ],
)
def test_a_name_leaves_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="names no file") as refused:
        file_within(tmp_path, name, where="m.json, line 3", error=ConfigError)

    assert refused.value.where == ("m.json, line 3",)
    str(refused.value).encode()


def test_a_link_leads_out_of_no_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "home too").mkdir()
    (home / "up").symlink_to("..")
    (home / "same start").symlink_to(tmp_path / "home too")
    (home / "here").symlink_to(".")
    (home / "circle").symlink_to("circle")

    for name in ("up", "up/a", "same start", "same start/a", "here"):
        with pytest.raises(SbpValueError, match="leads out of its folder"):
            file_within(home, name)
    with pytest.raises(SbpValueError, match="cannot be found"):
        file_within(home, "circle")
    # A folder may be named by a link itself.
    (tmp_path / "other name").symlink_to("home")
    assert file_within(tmp_path / "other name", "a")


@given(st.text(alphabet="./\\a\0~", max_size=8))
def test_what_is_accepted_is_in_the_folder(name: str) -> None:
    folder = Path("/somewhere that is not there")
    try:
        path = file_within(folder, name)
    except SbpValueError:
        return
    assert Path(os.path.normpath(path)).is_relative_to(folder)
    assert path != folder


def test_a_kind_of_file_has_a_size_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"format": "small", "version": 1, "x": 2}')
    kind = Document(kind=tuple, format="small", version=1, todo="", most_bytes=10)

    with pytest.raises(SbpValueError, match="too large"):
        kind.read(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3_000_000,
        '{"a":' * 2_000_000,
        "[1" + "0" * 5000 + ", " + "[" * 3_000_000,
        '{"a": 1, "a": 2, "b": ' + "[" * 3_000_000,
        "[NaN, " + "[" * 3_000_000,
        '["' + '\\"' * 2_000_000,
    ],
    ids=["lists", "mappings", "number", "twice", "nan", "text"],
)
def test_a_text_without_end_is_refused_soon(text: str) -> None:
    # In a thread, so that a reader that takes hours fails the test and nothing else.
    found: list[object] = []

    def read() -> None:
        try:
            found.append(parse(text))
        except SbpValueError as error:
            found.append(str(error)[:200])

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(60)

    assert str(found[0]).startswith("this is no JSON")


@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "folder", "NUL", "long"])
def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path = {"device": Path("/dev/zero"), "NUL": Path("a\0b"), "long": Path("x" * 300)}[kind]

    with pytest.raises(OSError, match=r"it is a|null|too long"):
        open_file(path)
    with pytest.raises(SbpValueError, match="the file cannot be read"):
        read_bytes(path)


def test_a_link_to_a_file_is_followed_unless_it_may_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")

    with open_file(tmp_path / "link") as file:
        assert file.read() == b"x"
    with pytest.raises(OSError, match="symbolic links"):
        open_file(tmp_path / "link", follow=False)
