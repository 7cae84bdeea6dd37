"""Storages of checkpoints: the conformance suite, and what a folder of this machine adds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins.kinds import CheckpointStorage, StorageFactory
from sbp_core.testing.storage import StorageConformance
from sbp_launch.checkpoint import folder_storage
from sbp_launch.checkpoint.folder_storage import LocalStorage, LocalStorageConfig, build_local
from sbp_launch.checkpoint.objects import FsspecConfig, FsspecStorage, build_fsspec


class TestLocal(StorageConformance):
    def make_factory(self) -> StorageFactory:
        return build_local(LocalStorageConfig())


class TestMemory(StorageConformance):
    refuses_a_second_run = False

    def make_factory(self) -> StorageFactory:
        return lambda folder: FsspecStorage(f"memory:/{folder}")


class TestFiles(StorageConformance):
    refuses_a_second_run = False

    def make_factory(self) -> StorageFactory:
        return lambda folder: FsspecStorage(f"file://{folder}")


def test_the_name_of_the_run_is_part_of_the_address() -> None:
    storage = build_fsspec(FsspecConfig(url="memory://all/{run}/kept"))(Path("/tmp/run-7"))

    assert storage.place("step-1") == "memory://all/run-7/kept/step-1"


@pytest.mark.parametrize("url", ["somewhere", "nowhere://run"])
def test_an_address_that_fsspec_does_not_know_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is no address|no installed package reaches"):
        build_fsspec(FsspecConfig(url=url))(Path("run"))


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(ConfigError, match="fsspec, which is not installed") as caught:
        FsspecStorage("memory://run")
    assert "sbp-launch[fsspec]" in caught.value.todo


def test_a_kill_before_the_manifest_leaves_the_former_objects(tmp_path: Path) -> None:
    storage = FsspecStorage(f"memory:/{tmp_path}")
    for data in (b"old", b"new"):
        staged = storage.stage("step-1")
        with staged.create("a.bin") as file:
            file.write(data)
        if data == b"old":
            staged.commit("manifest.json", b"{}", ["a.bin"])

    with storage.open("step-1", "a.bin") as file:
        assert file.read() == b"old"
    staged.commit("manifest.json", b"{}", ["a.bin"])
    with storage.open("step-1", "a.bin") as file:
        assert file.read() == b"new"
    assert storage.names() == ["step-1"]


def test_of_many_attempts_the_last_one_counts_and_no_other_stays(tmp_path: Path) -> None:
    storage = FsspecStorage(f"memory:/{tmp_path}")

    for number in range(12):
        commit(storage, "step-1", b"%d" % number)

        (folder,) = storage.files.ls(storage.path(""), detail=False)
        assert folder.endswith("step-1" if not number else f"step-1@{number + 1}")
        assert read(storage, "step-1") == b"%d" % number
    for attempt in (2, 9, 10):  # as left behind by kills
        for file in ("a.bin", "manifest.json"):
            storage.files.pipe_file(f"{storage.path(f'step-2@{attempt}')}/{file}", b"%d" % attempt)
    assert read(storage, "step-2") == b"10"


def test_objects_that_are_removed_are_no_checkpoint_before_they_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FsspecStorage(f"memory:/{tmp_path}")
    commit(storage, "step-1", b"data")
    monkeypatch.setattr(storage.files, "rm", lambda path, recursive: None)  # as a kill in between

    storage.remove("step-1")

    assert storage.names() == []


def commit(storage: CheckpointStorage, name: str, data: bytes) -> None:
    staged = storage.stage(name)
    with staged.create("a.bin") as file:
        file.write(data)
    staged.commit("manifest.json", b"{}", ["a.bin"])


def read(storage: CheckpointStorage, name: str) -> bytes:
    with storage.open(name, "a.bin") as file:
        return file.read()


def test_a_kill_between_the_two_renames_leaves_the_earlier_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path / "kept")
    commit(storage, "step-1", b"old")
    with monkeypatch.context() as patch:
        renames: list[Path] = []

        def rename(self: Path, target: Path) -> None:
            if renames:
                raise KeyboardInterrupt  # as a kill: nothing is put back
            renames.append(target)
            os.rename(self, target)  # noqa: PTH104 (Path.rename is what is patched here)

        patch.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            commit(storage, "step-1", b"new")

    assert list(storage.names()) == ["step-1"]
    assert read(storage, "step-1") == b"old"
    with storage.claim():
        assert sorted(path.name for path in storage.root.iterdir()) == [".lock", "step-1"]
        assert read(storage, "step-1") == b"old"
    commit(storage, "step-1", b"new")
    assert read(storage, "step-1") == b"new"


def test_a_claim_removes_the_folder_that_it_made_unless_something_is_in_it(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "kept")
    for _ in range(2):
        with storage.claim():
            assert storage.root.is_dir()
        assert not storage.root.exists()

    with storage.claim():
        commit(storage, "step-1", b"own")
    with storage.claim():
        storage.remove("step-1")

    assert [path.name for path in storage.root.iterdir()] == [".lock"]


def test_a_lock_that_its_last_holder_removes_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, taken = tmp_path / "kept", folder_storage._lock
    root.mkdir()

    def take(descriptor: int, path: Path) -> None:
        taken(descriptor, path)
        monkeypatch.setattr(folder_storage, "_lock", taken)
        (root / ".lock").unlink()
        root.rmdir()

    monkeypatch.setattr(folder_storage, "_lock", take)

    with LocalStorage(root).claim():
        assert (root / ".lock").exists()
        with pytest.raises(ConfigError, match="another run"), LocalStorage(root).claim():
            pass


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_an_earlier_attempt_has_left_is_replaced_and_no_link_followed(
    tmp_path: Path, kind: str
) -> None:
    storage = LocalStorage(tmp_path / "kept")
    (tmp_path / "kept" / ".step-1.part").mkdir(parents=True)
    left = tmp_path / "kept" / ".step-1.part" / "a.bin"
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    if kind == "link":
        left.symlink_to(other)
    else:
        left.write_bytes(b"half")

    commit(storage, "step-1", b"whole")

    assert read(storage, "step-1") == b"whole"
    assert other.read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_no_file_leads_out_of_its_folder(tmp_path: Path, kind: str) -> None:
    storage = LocalStorage(tmp_path / "kept")
    commit(storage, "step-1", b"own")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    file = storage.root / "step-1" / "a.bin"
    file.unlink()
    if kind == "link":
        file.symlink_to(secret)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()

    with pytest.raises(OSError, match=r"symbolic links|plain file"):
        storage.open("step-1", "a.bin")


def test_a_linked_folder_is_no_checkpoint(tmp_path: Path) -> None:
    elsewhere = LocalStorage(tmp_path / "elsewhere")
    commit(elsewhere, "step-1", b"theirs")
    storage = LocalStorage(tmp_path / "kept")
    storage.root.mkdir()
    (storage.root / "step-1").symlink_to(elsewhere.root / "step-1")

    assert list(storage.names()) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with (
        pytest.raises(ConfigError, match=r"checkpoints cannot be written to .*file/kept"),
        LocalStorage(tmp_path / "file" / "kept").claim(),
    ):
        pass


def test_who_holds_a_place_is_named(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with (
        storage.claim(),
        pytest.raises(ConfigError, match=f"another run writes .*: pid {os.getpid()} on host "),
        LocalStorage(tmp_path).claim(),
    ):
        pass
    with storage.claim():
        pass
