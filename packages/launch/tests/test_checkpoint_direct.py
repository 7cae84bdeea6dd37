"""Files that are written past the page cache hold what was written, on whatever file system."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_launch.checkpoint import durable_files
from sbp_launch.checkpoint.durable_files import GATHERED_BYTES, DirectFile
from sbp_launch.checkpoint.folder_storage import LocalStorage

DATA = os.urandom(2 * GATHERED_BYTES + 777)


@settings(max_examples=30, deadline=None)  # disks have their own
@given(
    ends=st.lists(
        st.one_of(
            st.integers(0, len(DATA)),
            st.sampled_from([GATHERED_BYTES - 1, GATHERED_BYTES, GATHERED_BYTES + 1]),
        ),
        max_size=5,
    ),
    is_flushed=st.booleans(),
)
def test_what_is_written_in_any_parts_is_in_the_file(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], is_flushed: bool
) -> None:
    path = tmp_path_factory.mktemp("direct") / "a.bin"
    starts = [0, *sorted(ends)]

    with DirectFile(path) as file:
        for start, end in pairwise(starts):
            assert file.write(DATA[start:end]) == end - start
            if is_flushed:
                file.flush()

    assert path.read_bytes() == DATA[: starts[-1]]


def test_whole_blocks_of_a_checkpoint_are_not_in_the_page_cache_and_the_rest_may_be(
    tmp_path: Path,
) -> None:
    with LocalStorage(tmp_path).stage("step-1").create("a.bin") as file:
        file.write(DATA)
    written = Path(file.name)
    (tmp_path / "cached.bin").write_bytes(DATA)

    try:
        assert is_cached(tmp_path / "cached.bin", 0)
    except OSError as error:
        pytest.skip(f"this file system does not say what is cached: {error}")

    assert is_cached(written, len(DATA) - 1)
    assert not is_cached(written, 0)
    assert not is_cached(written, 2 * GATHERED_BYTES - 1)


def is_cached(path: Path, offset: int) -> bool:
    """Return whether a byte of a file is in the page cache; to read it might bring it there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped,
    ):
        first = ctypes.c_char.from_buffer(mapped)
        page = ctypes.addressof(first) + offset // mmap.PAGESIZE * mmap.PAGESIZE
        found = (ctypes.c_ubyte * 1)()
        failed = libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), found)
        del first  # which keeps the mapping open
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return bool(found[0] & 1)


def test_a_file_system_without_such_writes_gets_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refusing(file: DirectFile, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, flags)

    monkeypatch.setattr(durable_files.fcntl, "fcntl", refusing)

    with DirectFile(tmp_path / "a.bin") as file:
        file.write(DATA)

    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_a_file_system_that_refuses_such_writes_late_gets_others(tmp_path: Path) -> None:
    with DirectFile(tmp_path / "a.bin") as file:
        file.write(DATA[:100])
        file.flush()
        file._turn(is_direct=True)  # again, from byte 100 on, at which no block begins
        file.write(DATA[100:])

    assert (tmp_path / "a.bin").read_bytes() == DATA


def test_where_a_file_may_not_grow_further_the_error_says_so(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GATHERED_BYTES + 500, before[1]))  # within a block
    try:
        file = DirectFile(tmp_path / "a.bin")
        with pytest.raises(OSError, match="File too large"):
            file.write(DATA)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.close()

    assert (tmp_path / "a.bin").read_bytes() == DATA[: GATHERED_BYTES + 500]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"kept")

    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "a.bin")

    assert (tmp_path / "a.bin").read_bytes() == b"kept"
