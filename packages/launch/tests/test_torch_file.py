"""Where a tensor lies in what torch.save wrote."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sbp_core.errors import ConfigError
from sbp_launch.checkpoint.formats.torch_file import TorchFileTensor, read_tensor

WHOLE = torch.arange(24.0).reshape(4, 6)


def saved(folder: Path, value: object) -> Path:
    path = folder / "saved.pt"
    torch.save(value, path)
    return path


def found_in(path: Path, before: int = 0) -> TorchFileTensor:
    return read_tensor(path, before, path.stat().st_size - before, "a test")


def rewritten(path: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> Path:
    """Write the records of a file anew, each as `change` does."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that stand twice
        for name, content in records.items():
            change(archive, name, content)
    return path


@pytest.mark.parametrize(
    "value", [WHOLE, WHOLE[1:, 2:4], WHOLE.T[3:], WHOLE[:, 0], WHOLE[2, 3], WHOLE[:0], WHOLE.int()]
)
@pytest.mark.parametrize("before", [0, 100])
def test_its_bytes_are_found(value: Tensor, before: int, tmp_path: Path) -> None:
    path = saved(tmp_path, value)
    path.write_bytes(bytes(before) + path.read_bytes())

    found = found_in(path, before)

    assert (found.shape, found.dtype) == (tuple(value.shape), str(value.dtype)[6:])
    data = bytearray(path.read_bytes()[found.offset : found.end])
    strides = found.strides or torch.empty(found.shape).stride()
    if value.numel():
        flat = torch.frombuffer(data, dtype=value.dtype)
        assert torch.equal(flat.as_strided(found.shape, strides), value)


def other_order(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(name, b"big" if name.endswith("/byteorder") else content)


def compressed(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    is_data = name.endswith("/data/0")
    archive.writestr(name, content, zipfile.ZIP_DEFLATED if is_data else zipfile.ZIP_STORED)


def twice(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(name, content)
    if name.endswith("/data/0"):
        archive.writestr(name, bytes(len(content)))


def without_data(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    if not name.endswith("/data/0"):
        archive.writestr(name, content)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_order, "its byte order is b'big'"),
        (compressed, "it has no single plain record 'data/0'"),
        (twice, "it has no single plain record 'data/0'"),
        (without_data, "it has no single plain record 'data/0'"),
    ],
)
def test_an_archive_that_says_something_else_is_refused(
    change: Callable[[zipfile.ZipFile, str, bytes], None], says: str, tmp_path: Path
) -> None:
    path = rewritten(saved(tmp_path, WHOLE), change)

    with pytest.raises(ConfigError, match=says):
        found_in(path)


@pytest.mark.parametrize(
    "value", [torch.ones(2, dtype=torch.complex64).conj(),
              torch.ones(2, dtype=torch.complex64).conj().imag],
)  # fmt: skip
def test_values_that_are_not_those_in_the_file_are_refused(value: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="conjugated or negated"):
        found_in(saved(tmp_path, value))


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="what is saved here is no tensor"):
        found_in(saved(tmp_path, [1, 2]))
