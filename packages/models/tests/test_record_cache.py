"""Records that are made once: what is kept, what is made again, and what cannot be kept."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sbp_core.errors import ConfigError, RunError
from sbp_models import record_cache
from sbp_models.record_cache import Chunk, Recipe, load_records

DTYPE = np.dtype([("a", "<f4", (2,)), ("b", "<u2")])


class Source:
    """A file of numbers, and how often records have been made of it."""

    def __init__(self, file: Path, count: int = 25) -> None:
        self.file, self.made = file, 0
        file.write_bytes(np.arange(count, dtype="<u2").tobytes())

    def recipe(self, **settings: object) -> Recipe:
        return Recipe(
            kind="numbers", files=[self.file], settings=settings, dtype=DTYPE, chunks=self.chunks
        )

    def chunks(self) -> Iterator[Chunk]:
        self.made += 1
        numbers = np.frombuffer(self.file.read_bytes(), "<u2")
        for begin in range(0, len(numbers), 10):
            own = numbers[begin : begin + 10]
            records = np.empty(len(own), DTYPE)
            records["a"], records["b"] = own[:, None] / 2, own
            yield Chunk(records=records, counts={"odd": int((own % 2).sum())}, read_bytes=begin)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "numbers")


def load(source: Source, folder: Path, **settings: object) -> list[int]:
    """Return the numbers of the records of a cache, and check the rest."""
    found = load_records(source.recipe(**settings), str(folder))
    numbers: list[int] = found.values["b"].tolist()
    assert found.values["a"].tolist() == [[number / 2] * 2 for number in numbers]
    assert sum(found.counts.values()) == sum(number % 2 for number in numbers)
    return numbers


def entry(folder: Path) -> Path:
    (found,) = folder.glob("numbers-*.lock")
    return found.with_suffix("")


def test_records_are_made_once(tmp_path: Path, source: Source) -> None:
    for _ in range(3):
        assert load(source, tmp_path / "c") == list(range(25))

    assert source.made == 1
    assert sorted(path.name for path in entry(tmp_path / "c").iterdir()) == [
        "about.json",
        "records.bin",
    ]
    assert (entry(tmp_path / "c") / "records.bin").stat().st_size == 25 * DTYPE.itemsize


def test_records_of_small_files_stay_in_memory_and_others_in_the_cache_of_the_user(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))

    small = load_records(source.recipe(), None)
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(record_cache, "IN_MEMORY_BYTES", 50)
    large = load_records(source.recipe(), None)

    assert (small.values == large.values).all() and small.counts == large.counts == {"odd": 12}
    assert len(list(tmp_path.glob("home/sbp/data/numbers-*/records.bin"))) == 1


def test_mapped_records_are_not_written_to(tmp_path: Path, source: Source) -> None:
    values = load_records(source.recipe(), str(tmp_path / "c")).values

    with pytest.raises(ValueError, match="read-only"):
        values["b"] = 0


def touch(file: Path) -> None:
    os.utime(file, ns=(1, 1))


def grow(file: Path) -> None:
    before = file.stat().st_mtime_ns
    file.write_bytes(file.read_bytes() + b"\x07\x00")
    os.utime(file, ns=(before, before))


@pytest.mark.parametrize("change", [touch, grow])
def test_a_file_that_was_changed_has_records_of_its_own(
    tmp_path: Path, source: Source, change: Callable[[Path], None]
) -> None:
    load(source, tmp_path / "c")

    change(source.file)

    assert len(load(source, tmp_path / "c")) == source.file.stat().st_size // 2
    assert source.made == 2


def test_other_settings_have_records_of_their_own(tmp_path: Path, source: Source) -> None:
    for settings in ({"x": 1}, {"x": 2}, {"x": 1}):
        load(source, tmp_path / "c", **settings)

    assert source.made == 2


def cut_off(path: Path) -> None:
    (path / "records.bin").write_bytes((path / "records.bin").read_bytes()[:-1])


def grown(path: Path) -> None:
    (path / "records.bin").write_bytes((path / "records.bin").read_bytes() + bytes(10))


def without_records(path: Path) -> None:
    (path / "records.bin").unlink()


def without_about(path: Path) -> None:
    (path / "about.json").unlink()


def linked(path: Path) -> None:
    (path / "records.bin").rename(path.parent / "elsewhere")
    (path / "records.bin").symlink_to(path.parent / "elsewhere")


def fewer(path: Path) -> None:
    edit(path, "num_records", 24)


def negative(path: Path) -> None:
    edit(path, "num_records", -1)


def of_others(path: Path) -> None:
    edit(path, "key", "00")


def other_size(path: Path) -> None:
    edit(path, "record_bytes", 8)


def no_counts(path: Path) -> None:
    edit(path, "counts", [1])


def no_json(path: Path) -> None:
    (path / "about.json").write_bytes(b"{\xff")


def edit(path: Path, key: str, value: object) -> None:
    about = json.loads((path / "about.json").read_text())
    (path / "about.json").write_text(json.dumps({**about, key: value}))


@pytest.mark.parametrize(
    "damage",
    [
        cut_off,
        grown,
        without_records,
        without_about,
        linked,
        fewer,
        negative,
        of_others,
        other_size,
        no_counts,
        no_json,
    ],
)
def test_what_is_damaged_is_made_again(
    tmp_path: Path,
    source: Source,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(source, tmp_path / "c")
    damage(entry(tmp_path / "c"))

    with caplog.at_level(logging.WARNING):
        found = [load(source, tmp_path / "c") for _ in range(2)]

    assert found == [list(range(25))] * 2
    assert source.made == 2
    assert "is damaged, and is created again" in caplog.text


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, source: Source) -> None:
    def chunks() -> Iterator[Chunk]:
        yield from source.chunks()
        touch(source.file)

    recipe = Recipe(kind="numbers", files=[source.file], settings={}, dtype=DTYPE, chunks=chunks)

    with pytest.raises(ConfigError, match="was changed while it was read"):
        load_records(recipe, str(tmp_path / "c"))

    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]


def test_records_that_cannot_be_made_leave_nothing(tmp_path: Path, source: Source) -> None:
    def chunks() -> Iterator[Chunk]:
        yield next(source.chunks())
        raise ConfigError("the file is broken")

    recipe = Recipe(kind="numbers", files=[source.file], settings={}, dtype=DTYPE, chunks=chunks)

    with pytest.raises(ConfigError, match="the file is broken"):
        load_records(recipe, str(tmp_path / "c"))

    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path, source: Source) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))  # bytes of a file; 250 are needed
    try:
        with pytest.raises(RunError, match="numbers of the data cannot be kept in") as caught:
            load(source, tmp_path / "c")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert "data.cache=FOLDER" in caught.value.todo
    assert [path.suffix for path in (tmp_path / "c").iterdir()] == [".lock"]
    assert load(source, tmp_path / "c") == list(range(25))


def test_a_folder_that_is_none_is_a_clear_error(tmp_path: Path, source: Source) -> None:
    (tmp_path / "c").write_text("")

    with pytest.raises(RunError, match="cannot be kept in"):
        load(source, tmp_path / "c")


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path, source: Source) -> None:
    load(source, tmp_path / "c")
    path = entry(tmp_path / "c")
    path.rename(tmp_path / "c" / f".{path.name}.{os.uname().nodename}-1-ab.part")
    other_host = tmp_path / "c" / f".{path.name}.{os.uname().nodename}x-1-ab.part"
    other_host.mkdir()

    load(source, tmp_path / "c")

    assert [left for left in (tmp_path / "c").iterdir() if left.suffix == ".part"] == [other_host]


def test_where_files_cannot_be_locked_the_records_of_one_are_kept(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlocked(*_: object) -> None:
        raise OSError("no locks")

    def chunks() -> Iterator[Chunk]:
        if source.made == 0:  # while these are made, another process is faster
            yield from source.chunks()
            load(source, tmp_path / "c")
        else:
            yield from source.chunks()

    monkeypatch.setattr(record_cache.fcntl, "flock", unlocked)
    recipe = Recipe(kind="numbers", files=[source.file], settings={}, dtype=DTYPE, chunks=chunks)

    found = load_records(recipe, str(tmp_path / "c"))

    assert found.values["b"].tolist() == list(range(25))
    assert source.made == 2
    assert not [left for left in (tmp_path / "c").iterdir() if left.suffix == ".part"]


PROCESS = """
import sys, time
from pathlib import Path
import numpy as np
from sbp_models.record_cache import Chunk, Recipe, load_records
file, folder = map(Path, sys.argv[1:])
def chunks():
    with (folder.parent / "made").open("a") as made:
        made.write("x")
    for part in range(20):
        yield Chunk(records=np.full(5, part, "<u2"), counts={"n": 5}, read_bytes=0)
        time.sleep(0.02)
recipe = Recipe(kind="n", files=[file], settings={}, dtype=np.dtype("<u2"), chunks=chunks)
found = load_records(recipe, str(folder))
assert found.values.tolist() == [part for part in range(20) for _ in range(5)]
assert found.counts == {"n": 100}
"""


def test_one_process_makes_records_and_others_wait_for_them(tmp_path: Path, source: Source) -> None:
    command = [sys.executable, "-c", PROCESS, str(source.file), str(tmp_path / "c")]

    processes = [subprocess.Popen(command) for _ in range(4)]

    assert [process.wait() for process in processes] == [0] * 4
    assert (tmp_path / "made").read_text() == "x"


def test_it_is_said_now_and_then_how_far_one_is(
    tmp_path: Path,
    source: Source,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(record_cache, "_TOLD_EVERY_S", 0.0)

    with caplog.at_level(logging.INFO):
        load(source, tmp_path / "c")

    assert "making numbers: 40%, 20 B of 50 B" in caplog.text
    assert "made numbers in" in caplog.text
