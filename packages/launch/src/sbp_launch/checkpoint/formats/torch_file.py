"""What `torch.save` writes: a zip with a pickle and the bytes of each storage. Without torch.

    archive/data.pkl      what was saved; of a tensor, which storage, where in it, shape, strides
    archive/byteorder     `little`
    archive/data/0        the bytes of storage 0, as they are

The pickle is read as plain data; nothing in it is imported or called.
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

#: What the pickle of a tensor asks for; and the dtype of each typed storage.
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

#: Dtypes that a pickle may name.
DTYPES = {
    f"torch.{dtype}": dtype
    for dtype in (
        *_STORAGES.values(), "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    )
}  # fmt: skip

_KNOWN = frozenset({_TENSOR, _TENSOR_OF_DTYPE, _ORDERED, _UNTYPED, *_STORAGES, *DTYPES})

#: Bytes of the pickle of one tensor or of one small value, at most.
_MOST_PICKLE_BYTES = 16 << 20

#: What `zipfile` raises of damaged archives.
_OF_ZIPFILE = (
    zipfile.BadZipFile, OSError, ValueError, LookupError, RuntimeError, EOFError, struct.error,
)  # fmt: skip

_TODO = "the file is damaged: get it again"


class TorchFileTensor(NamedTuple):
    """Where a saved tensor lies.

    Attributes:
        shape, dtype: Of the tensor.
        strides: In elements; row-major if None.
        offset: Of its first element, in bytes from the beginning of the file.
        end: Of its storage, likewise.
    """

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None
    offset: int
    end: int


def read_tensor(path: Path, offset: int, length: int, where: str) -> TorchFileTensor:
    """Return where the tensor lies that a part of a file holds.

    Args:
        path: Of the file.
        offset: Of what `torch.save` wrote, in bytes.
        length: Of that, in bytes.
        where: For messages.

    Raises:
        ConfigError: it is damaged, no tensor, or asks for something else.
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
        # After the header that is before the record, whose two last lengths may differ from
        # those of the directory.
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
    """Return in words what a part of a file holds that is no tensor: a number, a text, a list.

    Raises:
        ConfigError: it is damaged, or asks for something that it may not.
    """
    with _opened(path, offset, length, where) as archive:
        return _words(_pickle(archive, where))


def damaged_record(path: Path, offset: int, length: int, where: str) -> str | None:
    """Return the name of a record whose bytes are not what was written; None if all are.

    Raises:
        ConfigError: it is no zip of `torch.save`.
    """
    with _opened(path, offset, length, where) as archive:
        return archive.testzip()


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

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
                    f"bytes {offset} to {offset + length} are beyond its {size}", where=where,
                    todo=_TODO,
                )  # fmt: skip
            window = io.BufferedReader(_Window(file, offset, length))
            with zipfile.ZipFile(window) as archive:
                yield archive
    except SbpError:
        raise
    except _OF_ZIPFILE as error:
        raise ConfigError(
            f"this is nothing that torch.save wrote: {error}", where=where, todo=_TODO
        ) from error


def _record(archive: zipfile.ZipFile, name: str, where: str) -> zipfile.ZipInfo:
    """Return the record whose name ends so, after that of the archive."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED or found[0].flag_bits & 1:
        raise ConfigError(f"there is no one record {name!r} in it", where=where, todo=_TODO)
    return found[0]


def _pickle(archive: zipfile.ZipFile, where: str) -> Any:
    """Return what was saved, as plain data."""
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
    """Return a plain value in a few words."""
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
