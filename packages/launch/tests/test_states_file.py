"""A file of states is whole whenever it is there, at whatever moment a save fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbp_core.errors import RunError
from sbp_launch import states_file
from sbp_launch.states_file import StatesFile, write_states

FAILURES: tuple[Callable[[], BaseException], ...] = (
    lambda: OSError(28, "No space left on device"),
    lambda: SafetensorError("Error while serializing: I/O error: No space left on device"),
    KeyboardInterrupt,
    MemoryError,
)

#: What a save does, one after the other.
MOMENTS = ("before a byte", "half written", "written", "on the disk", "renamed", "never")


def states(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((4, 3), value), "step": torch.tensor(value)}


def failing_at(moment: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    """Let a save fail at one moment."""

    def save(tensors: Mapping[str, Tensor], path: Path) -> None:
        if moment == "before a byte":
            raise error
        save_file(dict(tensors), path)
        if moment == "half written":
            path.write_bytes(path.read_bytes()[:50])
            raise error

    def wait(path: Path) -> None:
        if moment == ("renamed" if path.is_dir() else "written"):
            raise error

    def replace(self: Path, target: Path) -> None:
        if moment == "on the disk":
            raise error
        os.replace(self, target)  # noqa: PTH105 (Path.replace is what is patched here)

    patch.setattr(states_file, "save_file", save)
    patch.setattr(states_file, "_wait_for_disk", wait)
    patch.setattr(Path, "replace", replace)


@given(
    moment=st.sampled_from(MOMENTS),
    failure=st.sampled_from(FAILURES),
    is_there=st.booleans(),
)
def test_at_whatever_moment_a_save_fails_the_former_or_the_new_file_is_whole(
    moment: str, failure: Callable[[], BaseException], is_there: bool
) -> None:
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        path = Path(place, "states.safetensors")
        if is_there:
            write_states(path, states(1.0))
        error = failure()
        failing_at(moment, error, patch)

        if moment == "never":
            write_states(path, states(2.0))
        else:
            expected = RunError if isinstance(error, OSError | SafetensorError) else type(error)
            with pytest.raises(expected) as caught:
                write_states(path, states(2.0))
            assert expected is not RunError or "No space left on device" in str(caught.value)

        value = 2.0 if moment in ("renamed", "never") else 1.0
        whole = [path.name] if is_there or value == 2.0 else []
        assert [file.name for file in Path(place).iterdir()] == whole
        assert not whole or torch.equal(load_file(path)["weight"], states(value)["weight"])


def test_a_disk_without_room_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as full after 1000 bytes
    try:
        with pytest.raises(RunError, match=r"states\.safetensors cannot be written: ") as caught:
            write_states(tmp_path / "states.safetensors", {"w": torch.zeros(5000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert "File too large" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file or directory"):
        write_states(tmp_path / "gone" / "states.safetensors", states(1.0))


def test_a_process_killed_while_it_saves_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    write_states(path, states(1.0))
    program = """
import os, signal, sys, torch
from pathlib import Path
from sbp_launch import states_file
states_file._wait_for_disk = lambda path: os.kill(os.getpid(), signal.SIGKILL)
states_file.write_states(Path(sys.argv[1]), {"weight": torch.zeros(4, 3)})
"""

    killed = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=240)

    assert killed.returncode == -signal.SIGKILL
    assert torch.equal(load_file(path)["weight"], states(1.0)["weight"])
    write_states(path, states(2.0))  # in spite of what the killed one left aside
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_states_that_are_no_block_of_memory_are_written_too(tmp_path: Path) -> None:
    write_states(tmp_path / "states.safetensors", {"w": torch.arange(6.0).reshape(2, 3).T})

    found = load_file(tmp_path / "states.safetensors")["w"]
    assert torch.equal(found, torch.arange(6.0).reshape(2, 3).T)


def test_a_file_is_a_mapping_whose_tensors_can_be_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    written = {
        "weight": torch.arange(24.0).reshape(4, 3, 2),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "empty": torch.zeros(0, 3),
    }
    write_states(path, written)

    found = StatesFile(path)

    assert found.keys() == written.keys()
    assert "nobody" not in found
    with pytest.raises(KeyError):
        found["nobody"]
    for name, value in written.items():
        assert torch.equal(found[name], value)
        assert (found.like(name).shape, found.like(name).dtype) == (value.shape, value.dtype)
        assert torch.equal(found.part(name, [(0, extent) for extent in value.shape]), value)
    part = found.part("weight", [(1, 3), (2, 3), (0, 2)])
    assert torch.equal(part, written["weight"][1:3, 2:3])
    assert torch.equal(found.part("weight", [(2, 2), (0, 3), (0, 2)]), torch.empty(0, 3, 2))


@given(st.integers(0, 5), st.integers(0, 4), st.data())
def test_any_part_of_a_file_is_the_slice_of_the_tensor(
    rows: int, columns: int, data: st.DataObject
) -> None:
    whole = torch.arange(float(rows * columns)).reshape(rows, columns)
    bounds = []
    for extent in whole.shape:
        start = data.draw(st.integers(0, extent))
        bounds.append((start, data.draw(st.integers(start, extent))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "states.safetensors"
        write_states(path, {"x": whole})

        part = StatesFile(path).part("x", bounds)

    assert torch.equal(part, whole[tuple(slice(*dim) for dim in bounds)])
