"""Read and check the headers of safetensors files, without torch; the result is a `TensorIndex`.

The tensors are in one file, or in Hugging Face's layout: one file, or shards and an index.

    config.json                         not read and not written
    model.safetensors.index.json        {"metadata": {"total_size": ...}, "weight_map": {...}}
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from sbp_core.errors import ConfigError, nearest, suggestion
from sbp_core.serialize import load, open_file, parse, read_text, shown
from sbp_launch.checkpoint.formats.index import (
    ITEMSIZE,
    StoredPiece,
    StoredTensor,
    TensorIndex,
    check_shape,
    inner_path,
)

#: Largest size of a header in bytes, as in the library safetensors.
MOST_HEADER_BYTES = 100_000_000

#: Names of dtypes in safetensors.
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "complex64": "C64",
}  # fmt: skip

_DTYPES = {code: dtype for dtype, code in CODES.items()}
_METADATA = "__metadata__"
_TODO = "the file is damaged, or no safetensors file: get it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """The header's entry of a tensor; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_safetensors(path: Path) -> TensorIndex:
    """Return the index of the tensors of a file.

    Raises:
        ConfigError: it cannot be read, is not a safetensors file, or is damaged.
    """
    error = partial(ConfigError, where=str(path), todo=_TODO)
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
                raise error(
                    f"this is no safetensors file: its header would have {length} bytes, and the "
                    f"file has {size}",
                    accepted=f"a header of at most {MOST_HEADER_BYTES} bytes, within the file",
                )
            text = file.read(length).decode("utf-8")
    except UnicodeDecodeError as cause:
        raise error("this is no safetensors file: its header is no UTF-8") from cause
    except OSError as cause:
        what = f"the file cannot be read: {cause.strerror or cause}"
        raise ConfigError(what, where=str(path)) from cause
    header = parse(text, where=f"the header of {path}", error=ConfigError, todo=_TODO)
    if not isinstance(header, dict):
        raise error(f"the header is {shown(header)}", accepted="a mapping")
    notes = header.pop(_METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(v, str) for v in notes.values()):
        raise error(f"{_METADATA} is {shown(notes)}", accepted="texts by name")
    entries = load(
        header,
        Mapping[str, _Entry],  # type: ignore[type-abstract] # a type is asked for, not a class
        root="the header",
        where=str(path),
        error=ConfigError,
        todo=_TODO,
    )
    tensors: dict[str, StoredTensor] = {}
    end = begin = 8 + length
    for name, entry in sorted(entries.items(), key=lambda one: one[1].data_offsets):
        if entry.dtype not in _DTYPES:
            raise ConfigError(
                f"{name!r} has the dtype {shown(entry.dtype)}",
                where=str(path),
                accepted=", ".join(_DTYPES),
                todo=suggestion(entry.dtype, _DTYPES, _TODO),
            )
        dtype, shape = _DTYPES[entry.dtype], entry.shape
        check_shape(name, shape, dtype, path)
        start, stop = (begin + offset for offset in entry.data_offsets)
        wanted = prod(shape) * ITEMSIZE[dtype]
        if start != end or stop - start != wanted:
            raise error(
                f"{name!r}, {dtype} of shape {shape}, is at bytes {start} to {stop}",
                accepted=f"{wanted} bytes from {end} on, where the tensor before it ends",
            )
        bounds = tuple((0, extent) for extent in shape)
        piece = StoredPiece(file=path.name, offset=start, bounds=bounds)
        tensors[name], end = StoredTensor(shape=shape, dtype=dtype, pieces=(piece,)), stop
    if end != size:
        raise error(f"the tensors end at byte {end}, and the file has {size}")
    ordered = {name: tensors[name] for name in entries}
    return TensorIndex(path=path, folder=path.parent, tensors=ordered, notes=notes).validate()


#: Name of a single file, of the index of shards, and of a shard by its number and their count.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"

_ONE_REVISION = "get the files again, all of one revision"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder has weights in this layout."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def read_hugging_face(folder: Path) -> TensorIndex:
    """Return the index of the tensors of a folder.

    Raises:
        ConfigError: a file is missing or damaged, or the index and the shards differ.
    """
    index = folder / INDEX
    if not index.is_file():
        found = read_safetensors(inner_path(folder, SINGLE, folder))
        return replace(found, path=folder, folder=folder)
    inner_path(folder, INDEX, folder)
    text = read_text(index, most_bytes=MOST_HEADER_BYTES, error=ConfigError, todo=_ONE_REVISION)
    value = parse(text, where=str(index), error=ConfigError, todo=_ONE_REVISION)
    weight_map = load(
        value, _Index, root="the index", where=str(index), error=ConfigError, todo=_ONE_REVISION
    ).weight_map
    tensors: dict[str, StoredTensor] = {}
    notes: dict[str, str] = {}
    for file in sorted(set(weight_map.values())):
        shard = read_safetensors(inner_path(folder, file, index))
        notes |= shard.notes
        for name, tensor in shard.tensors.items():
            if weight_map.get(name) != file:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise ConfigError(
                    f"{name!r} is in {file}, and {where} according to the index",
                    where=str(index),
                    todo=_ONE_REVISION,
                )
            pieces = tuple(replace(piece, file=file) for piece in tensor.pieces)
            tensors[name] = replace(tensor, pieces=pieces)
    for name, file in weight_map.items():
        if name not in tensors:
            near = nearest(name, tensors)
            raise ConfigError(
                f"{name!r} is not in {file}, as the index says",
                where=str(index),
                todo=f"it has {near!r}; {_ONE_REVISION}" if near else _ONE_REVISION,
            )
    return TensorIndex(
        path=folder,
        folder=folder,
        tensors={name: tensors[name] for name in weight_map},
        notes=notes,
    ).validate()
