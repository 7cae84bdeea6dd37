"""The conformance suite of storages: subclass `StorageConformance` and supply a method.

    class TestMyStorage(StorageConformance):
        def make_factory(self):
            return build(MyConfig(url="memory://runs"))

The tests take pytest's fixture `tmp_path`, a new run folder for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.plugins.kinds import CheckpointStorage, StorageFactory

__all__ = ["StorageConformance"]

_LAST = "manifest.json"


class StorageConformance(ABC):
    """Tests that every storage must pass. See the module's docstring for how to use it."""

    #: Whether a run is refused while another one writes to the same place.
    refuses_a_second_run: bool = True

    @abstractmethod
    def make_factory(self) -> StorageFactory:
        """Return the result of `build(config)`. Different run folders are different places."""

    def test_a_place_that_was_never_written_to_is_empty(self, tmp_path: Path) -> None:
        """Reading creates nothing."""
        assert list(self._storage(tmp_path).names()) == []
        assert list(tmp_path.iterdir()) == []

    def test_what_is_committed_can_be_read(self, tmp_path: Path) -> None:
        """Another object reads it, with sizes, from any byte on."""
        files = {"a.bin": bytes(range(256)) * 40, "empty.bin": b"", "b.bin": b"b"}
        _write(self._storage(tmp_path), "step-1", files)

        storage = self._storage(tmp_path)

        assert list(storage.names()) == ["step-1"]
        _check(storage, "step-1", files)
        with storage.open("step-1", "a.bin") as file:
            file.seek(300)
            assert file.read(5) == files["a.bin"][300:305]
            buffer = bytearray(7)
            file.seek(10)
            assert file.readinto(buffer) == 7  # type: ignore[attr-defined] # of binary files
            assert bytes(buffer) == files["a.bin"][10:17]

    def test_nobody_sees_what_is_not_committed(self, tmp_path: Path) -> None:
        """Neither while it is written, nor if it is never committed."""
        storage = self._storage(tmp_path)
        staged = storage.stage("step-1")
        with staged.create("a.bin") as file:
            file.write(b"half")

        assert list(self._storage(tmp_path).names()) == []
        with staged.open("a.bin") as file:
            assert file.read() == b"half"
        staged.discard()
        assert list(self._storage(tmp_path).names()) == []

    def test_what_is_committed_is_not_discarded(self, tmp_path: Path) -> None:
        """A process may discard without knowing of the commit, if the committing process ended."""
        storage = self._storage(tmp_path)
        for value in (b"former", b"later"):
            staged = storage.stage("step-1")
            with staged.create("a.bin") as file:
                file.write(value)
            staged.commit("manifest.json", b"{}", ["a.bin"])
            staged.discard()
            storage.stage("step-1").discard()

            assert self._storage(tmp_path).names() == ["step-1"]
            with self._storage(tmp_path).open("step-1", "a.bin") as file:
                assert file.read() == value

    def test_several_write_one_folder_and_one_commits_it(self, tmp_path: Path) -> None:
        """Files that are not named in the commit are gone."""
        ours, theirs = (self._storage(tmp_path).stage("step-1") for _ in range(2))
        for staged, file_name in ((ours, "0.bin"), (theirs, "1.bin"), (theirs, "1.json")):
            with staged.create(file_name) as file:
                file.write(file_name.encode())

        ours.commit(_LAST, b"{}", ["0.bin", "1.bin"])

        storage = self._storage(tmp_path)
        _check(storage, "step-1", {"0.bin": b"0.bin", "1.bin": b"1.bin"})

    def test_a_file_that_fails_is_not_there(self, tmp_path: Path) -> None:
        """The next attempt writes it again."""
        staged = self._storage(tmp_path).stage("step-1")
        try:
            with staged.create("a.bin") as file:
                file.write(b"half")
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        try:
            staged.open("a.bin").close()
        except OSError:
            pass
        else:
            raise AssertionError("a file exists although writing it failed")
        with staged.create("a.bin") as file:
            file.write(b"whole")
        staged.commit(_LAST, b"{}", ["a.bin"])
        _check(self._storage(tmp_path), "step-1", {"a.bin": b"whole"})

    def test_a_folder_of_the_same_name_is_replaced(self, tmp_path: Path) -> None:
        """The earlier folder can be read until the new one is committed, and is gone then."""
        storage = self._storage(tmp_path)
        _write(storage, "step-1", {"a.bin": b"old", "more.bin": b"old"})
        staged = storage.stage("step-1")
        with staged.create("b.bin") as file:
            file.write(b"new")
        assert list(self._storage(tmp_path).names()) == ["step-1"]
        with storage.open("step-1", "a.bin") as file:
            assert file.read() == b"old"

        staged.commit(_LAST, b"{}", ["b.bin"])

        _check(self._storage(tmp_path), "step-1", {"b.bin": b"new"})

    def test_a_folder_that_is_removed_is_gone(self, tmp_path: Path) -> None:
        """The other folders stay."""
        storage = self._storage(tmp_path)
        for name in ("step-1", "step-2"):
            _write(storage, name, {"a.bin": name.encode()})

        storage.remove("step-1")

        assert list(self._storage(tmp_path).names()) == ["step-2"]
        _check(storage, "step-2", {"a.bin": b"step-2"})

    def test_what_is_missing_is_an_os_error(self, tmp_path: Path) -> None:
        """Missing files and folders raise an `OSError`."""
        storage = self._storage(tmp_path)
        _write(storage, "step-1", {"a.bin": b""})
        for action in (
            lambda: storage.open("step-1", "nobody.bin").close(),
            lambda: storage.open("step-2", "a.bin").close(),
            lambda: storage.sizes("step-2"),
            lambda: storage.stage("step-3").open("a.bin").close(),
        ):
            try:
                action()
            except OSError:
                continue
            raise AssertionError("a call on something missing raised no OSError")

    def test_a_second_run_is_refused(self, tmp_path: Path) -> None:
        """Until the first one has ended; the next claim removes uncommitted folders."""
        storage = self._storage(tmp_path)
        with storage.claim():
            staged = storage.stage("step-1")
            with staged.create("a.bin") as file:
                file.write(b"begun")
            if self.refuses_a_second_run:
                try:
                    with self._storage(tmp_path).claim():
                        raise AssertionError("two runs write to one place")
                except ConfigError:
                    pass
        _write(storage, "step-2", {"b.bin": b""})
        with self._storage(tmp_path).claim():
            assert list(storage.names()) == ["step-2"]
            try:
                staged.open("a.bin").close()
            except OSError:
                pass
            else:
                raise AssertionError("an unfinished checkpoint still exists after the next claim")

    def test_two_runs_have_two_places(self, tmp_path: Path) -> None:
        """Each run folder is a place of its own."""
        folders = [tmp_path / "one", tmp_path / "two"]
        for folder in folders:
            folder.mkdir()
            _write(self._storage(folder), f"step-of-{folder.name}", {})

        for folder in folders:
            assert list(self._storage(folder).names()) == [f"step-of-{folder.name}"]

    def test_a_place_has_names_for_messages(self, tmp_path: Path) -> None:
        """The names distinguish folders and files."""
        storage = self._storage(tmp_path)
        names = [storage.place(), storage.place("step-1"), storage.place("step-1", "a.bin")]
        assert len(set(names)) == 3
        assert names[2].endswith("a.bin")

    def _storage(self, run_folder: Path) -> CheckpointStorage:
        return self.make_factory()(run_folder)


def _write(storage: CheckpointStorage, name: str, files: Mapping[str, bytes]) -> None:
    staged = storage.stage(name)
    for file_name, data in files.items():
        with staged.create(file_name) as file:
            file.write(data)
    staged.commit(_LAST, b"{}", list(files))


def _check(storage: CheckpointStorage, name: str, files: Mapping[str, bytes]) -> None:
    wanted = {**files, _LAST: b"{}"}
    sizes = {file_name: len(data) for file_name, data in wanted.items()}
    assert dict(storage.sizes(name)) == sizes
    for file_name, data in wanted.items():
        with storage.open(name, file_name) as file:
            assert file.read() == data, file_name
