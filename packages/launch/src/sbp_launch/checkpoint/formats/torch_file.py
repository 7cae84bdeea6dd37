"""Read tensors and values written by `torch.save`, without torch and without unpickling.

    archive/data.pkl      the object; of a tensor: its storage, offset, shape and strides
    archive/byteorder     `little`
    archive/data/0        the bytes of storage 0, uncompressed

The file is a zip. The pickle is parsed as plain data (`pickles`); nothing in it is imported or
called. `distributed_checkpoint` reads its chunks with this module.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sbp_core.errors import ConfigError, SbpError
from sbp_core.serialize import open_file, shown
from sbp_launch.checkpoint.formats.index import ITEMSIZE, check_shape
from sbp_launch.checkpoint.formats.pickles import (
    Pairs,
    PersistentId,
    PickleCall,
    PickleGlobal,
    read_pickle,
)

#: Globals in the pickle of a tensor, and the dtype of each typed storage.
_TENSOR = "torch._utils._rebuild_tensor_v2"
_TENSOR_OF_DTYPE = "torch._utils._rebuild_tensor_v3"
_ORDERED = "collections.OrderedDict"
_UNTYPED = "torch.storage.UntypedStorage"
_STORAGES = {
    "torch.DoubleStorage": "float64", "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64", "torch.IntStorage": "int32", "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8", "torch.ByteStorage": "uint8", "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
}  # fmt: skip

#: Dtypes that may occur in a pickle, by their globals.
DTYPES = {
    f"torch.{dtype}": dtype
    for dtype in (
        *_STORAGES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip

_KNOWN = frozenset({_TENSOR, _TENSOR_OF_DTYPE, _ORDERED, _UNTYPED, *_STORAGES, *DTYPES})

#: Largest size in bytes of the pickle of one tensor or of one small value.
_MOST_PICKLE_BYTES = 16 << 20

#: Exceptions of `zipfile` for damaged archives.
_OF_ZIPFILE = (
    zipfile.BadZipFile, OSError, ValueError, LookupError, RuntimeError, EOFError, struct.error,
)  # fmt: skip

_TODO = "the file is damaged: get it again"


class TorchFileTensor(NamedTuple):
    """Position of a saved tensor in a file.

    Attributes:
        shape, dtype: Shape and dtype of the tensor.
        strides: Strides in elements; None for row-major.
        offset: Position of its first element, in bytes from the start of the file.
        end: End of its storage, in bytes from the start of the file.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    offset: int
    end: int


def read_tensor(path: Path, offset: int, length: int, where: str) -> TorchFileTensor:
    """Return the position of the tensor in a part of a file.

    Args:
        path: Path of the file.
        offset: Start of the output of `torch.save`, in bytes.
        length: Length of that output in bytes.
        where: The place, for messages.

    Raises:
        ConfigError: it is damaged, is not a tensor, or has an unexpected global.
    """
    error = partial(ConfigError, where=where, todo=_TODO)
    with _opened(path, offset, length, where) as archive:
        found = _pickle(archive, where)
        if not isinstance(found, PickleCall) or str(found.of) not in (_TENSOR, _TENSOR_OF_DTYPE):
            raise error("what is saved here is no tensor")
        given: list[Any] = [*found.args, *[None] * 4]
        storage, first, shape, strides = given[:4]
        is_shaped = isinstance(shape, tuple) and isinstance(strides, tuple)
        if len(found.args) < 6 or not (
            is_shaped
            and len(shape) == len(strides)
            and all(type(n) is int and n >= 0 for n in (first, *shape, *strides))
        ):
            raise error("the tensor saved here has no shape")
        is_new = str(found.of) == _TENSOR_OF_DTYPE
        if len(found.args) > 6 + is_new and found.args[6 + is_new]:
            raise ConfigError("the tensor saved here is conjugated or negated", where=where)
        key_of = storage.key if isinstance(storage, PersistentId) else None
        match key_of if isinstance(key_of, tuple) else None:
            case ("storage", PickleGlobal() as kind, str(key), _, _):
                dtype = _STORAGES.get(str(kind), "uint8")
            case _:
                raise error("the tensor saved here has no storage")
        if is_new:
            dtype = DTYPES.get(str(found.args[6]), "")
        check_shape("the tensor", shape, dtype, path)
        info = _record(archive, f"data/{key}", where)
        # The data follow the local header of the record. Its name and extra field may be longer or
        # shorter than in the central directory.
        file: Any = archive.fp
        file.seek(info.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", file.read(4))
        begin = offset + info.header_offset + 30 + name_length + extra_length
        rows = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return TorchFileTensor(
            shape=shape,
            dtype=dtype,
            strides=None if strides == rows else strides,
            offset=begin + first * ITEMSIZE[dtype],
            end=begin + info.file_size,
        )


def read_value(path: Path, offset: int, length: int, where: str) -> str:
    """Describe in words the value in a part of a file that is not a tensor: a number, a list.

    Raises:
        ConfigError: it is damaged, or has an unexpected global.
    """
    with _opened(path, offset, length, where) as archive:
        return _words(_pickle(archive, where))


def damaged_record(path: Path, offset: int, length: int, where: str) -> str | None:
    """Return the name of a record whose checksum does not match; None if all match.

    Raises:
        ConfigError: it is not a zip of `torch.save`.
    """
    with _opened(path, offset, length, where) as archive:
        return archive.testzip()


class _Window(io.RawIOBase):
    """A byte range of a file, as a file object."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = max(0, at + (0, self._at, self._length)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view) or 0
        self._at += count
        return count


@contextmanager
def _opened(path: Path, offset: int, length: int, where: str) -> Iterator[zipfile.ZipFile]:
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            if not 0 <= offset <= offset + length <= size:
                raise ConfigError(
                    f"bytes {offset} to {offset + length} are not in the file of {size} bytes",
                    where=where, todo=_TODO,
                )  # fmt: skip
            window = io.BufferedReader(_Window(file, offset, length))
            with zipfile.ZipFile(window) as archive:
                yield archive
    except SbpError:
        raise
    except _OF_ZIPFILE as error:
        raise ConfigError(
            f"this was not written by torch.save: {error}", where=where, todo=_TODO
        ) from error


def _record(archive: zipfile.ZipFile, name: str, where: str) -> zipfile.ZipInfo:
    """Return the record of a name, without the folder that `torch.save` puts before it."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].flag_bits & 1:
        raise ConfigError(f"it has no single plain record {name!r}", where=where, todo=_TODO)
    return found[0]


def _pickle(archive: zipfile.ZipFile, where: str) -> Any:
    """Return the saved object as plain data."""
    names = {info.filename.partition("/")[2] for info in archive.infolist()}
    if "byteorder" in names:
        order = archive.open(_record(archive, "byteorder", where)).read(16)
        if order != b"little":
            raise ConfigError(f"its byte order is {order!r}", where=where, accepted="little")
    info = _record(archive, "data.pkl", where)
    if info.file_size > _MOST_PICKLE_BYTES:
        raise ConfigError(
            f"its pickle has {info.file_size} bytes", where=where,
            accepted=f"at most {_MOST_PICKLE_BYTES}",
        )  # fmt: skip
    return read_pickle(archive.open(info).read(_MOST_PICKLE_BYTES), _KNOWN, where)


def _words(value: Any, depth: int = 2) -> str:
    """Describe a plain value in a few words."""
    if isinstance(value, str | int | float | None):
        return shown(value)
    if isinstance(value, list | tuple) and depth and len(value) <= 8:
        inner = ", ".join(_words(part, depth - 1) for part in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if isinstance(value, Pairs):
        return f"a mapping of {len(value.items)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a {value.of.name}" if isinstance(value, PickleCall) else f"a {type(value).__name__}"
