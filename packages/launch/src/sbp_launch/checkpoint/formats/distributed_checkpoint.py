"""Read checkpoints of `torch.distributed.checkpoint`, without unpickling and without torch.

    .metadata           a pickle: shape, dtype and chunks of each tensor, place of each chunk
    __0_0.distcp        the output of `torch.save` for each chunk, one after the other

`torch.distributed.checkpoint.load` executes the pickle in `.metadata`, and so any code in it. Here
its opcodes are read as plain data: a global that the format does not use is refused, and nothing is
imported or called. The result is a `TensorIndex`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sbp_core.errors import ConfigError
from sbp_core.serialize import read_bytes, shown
from sbp_launch.checkpoint.formats.index import (
    ITEMSIZE,
    StoredPiece,
    StoredTensor,
    TensorIndex,
    inner_path,
)
from sbp_launch.checkpoint.formats.pickles import Pairs, PickleCall, PickleGlobal, read_pickle
from sbp_launch.checkpoint.formats.torch_file import DTYPES, read_tensor, read_value

#: Name of the file that describes the tensors.
METADATA = ".metadata"

#: Its largest size in bytes.
_MOST_BYTES = 256 << 20

_HOME = "torch.distributed.checkpoint"
_TENSOR = f"{_HOME}.metadata.TensorStorageMetadata"
_VALUE = f"{_HOME}.metadata.BytesStorageMetadata"
_INDEX = f"{_HOME}.metadata.MetadataIndex"
_OF_METADATA = (
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
)
_OF_OTHERS = (
    "torch.Size torch.serialization._get_layout collections.OrderedDict pathlib.PosixPath "
    "pathlib.WindowsPath pathlib._local.PosixPath pathlib._local.WindowsPath"
)
_KNOWN = frozenset(
    {
        *(f"{_HOME}.metadata.{name}" for name in _OF_METADATA.split()),
        f"{_HOME}.filesystem._StorageInfo",
        *_OF_OTHERS.split(),
        *DTYPES,
    }
)

_TODO = "the checkpoint is damaged, or of another version of PyTorch: write it again"


def is_distributed_checkpoint(folder: Path) -> bool:
    """Return whether a folder has `.metadata`, which `torch.distributed.checkpoint` writes last."""
    return (folder / METADATA).is_file()


def read_distributed_checkpoint(folder: Path) -> TensorIndex:
    """Return the index of the tensors of a checkpoint.

    Raises:
        ConfigError: it is damaged, or contains something that does not belong to the format.
    """
    found = _read_metadata(folder)
    path, places = Path(found.where), dict(found.places())
    tensors: dict[str, StoredTensor] = {}
    others: dict[str, str] = {}
    for name, entry in found.entries():
        if str(entry.of) == _VALUE:  # not a tensor: kept as text, never executed
            others[name] = "nowhere"
            if (place := places.get((name, None))) is not None:
                file = inner_path(folder, place.file, path)
                try:
                    others[name] = read_value(file, place.offset, place.length, f"{file}, {name!r}")
                except ConfigError as error:
                    others[name] = f"not read: {error.what}"
            continue
        shape, dtype, chunks = found.tensor(name, entry)
        pieces = []
        for offsets, sizes in chunks:
            if 0 in sizes:
                continue  # an empty chunk, as of a rank that has no part of the tensor
            place = places.get((name, offsets))
            if place is None:
                raise found.error(f"the chunk of {name!r} at {offsets} is not stored")
            pieces.append(_piece(folder, place, (offsets, sizes), dtype, name, path))
        tensors[name] = StoredTensor(shape=shape, dtype=dtype, pieces=tuple(pieces))
    notes = {"version": str(found.version)} if found.version else {}
    return TensorIndex(
        path=folder, folder=folder, tensors=tensors, notes=notes, others=others
    ).validate()


def chunk_places(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, file, offset and length of everything that was written.

    Raises:
        ConfigError: see `read_distributed_checkpoint`.
    """
    for (name, _), place in _read_metadata(folder).places():
        yield name, *place


def _read_metadata(folder: Path) -> _Metadata:
    path = inner_path(folder, METADATA, folder)
    data = read_bytes(path, most_bytes=_MOST_BYTES, error=ConfigError, todo=_TODO)
    return _Metadata(read_pickle(data, _KNOWN, str(path)), str(path))


class _Place(NamedTuple):
    """A range of bytes: file, and offset and length in it."""

    file: str
    offset: int
    length: int


def _piece(
    folder: Path,
    place: _Place,
    chunk: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: str,
    name: str,
    path: Path,
) -> StoredPiece:
    """Return the position of a chunk's elements in its file; `chunk` is its offsets and sizes."""
    file, (offsets, sizes) = inner_path(folder, place.file, path), chunk
    where = f"{file}, bytes {place.offset} to {place.offset + place.length}, {name!r}"
    saved = read_tensor(file, place.offset, place.length, where)
    if (saved.shape, saved.dtype) != (sizes, dtype):
        raise ConfigError(
            f"the chunk of {name!r} is {saved.dtype} of shape {saved.shape}",
            where=where,
            accepted=f"{dtype} of shape {sizes}, as {METADATA} says",
            todo=_TODO,
        )
    bounds = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
    piece = StoredPiece(file=place.file, offset=saved.offset, bounds=bounds, strides=saved.strides)
    end = saved.offset + piece.span * ITEMSIZE[dtype]
    if end > saved.end or saved.end > place.offset + place.length:
        raise ConfigError(f"the chunk of {name!r} ends after its storage", where=where, todo=_TODO)
    return piece


class _Metadata:
    """The contents of `.metadata`; every part is validated on access."""

    def __init__(self, root: Any, where: str) -> None:
        self.where = where
        if not isinstance(root, PickleCall) or str(root.of) != f"{_HOME}.metadata.Metadata":
            raise self.error("it does not hold metadata")
        self.root = root
        version = self._field(root, "version", None)
        self.version = version if isinstance(version, str) else ""

    def error(self, why: str) -> ConfigError:
        return ConfigError(
            f"this is no metadata of torch.distributed.checkpoint: {why}",
            where=self.where,
            todo=_TODO,
        )

    def _field(self, made: PickleCall, name: str, *default: Any) -> Any:
        try:
            return made[name]
        except KeyError as error:
            if default:
                return default[0]
            raise self.error(f"a {made.of.name} has no {name!r}") from error

    def _pairs(self, name: str) -> list[tuple[Any, Any]]:
        value = self._field(self.root, name)
        if not isinstance(value, Pairs):
            raise self.error(f"its {name} is no mapping")
        return value.items

    def _sizes(self, value: Any, what: str) -> tuple[int, ...]:
        """Validate a `torch.Size` and return its extents."""
        args = value.args if isinstance(value, PickleCall) and str(value.of) == "torch.Size" else ()
        sizes = args[0] if len(args) == 1 else None
        if not isinstance(sizes, tuple) or not all(type(n) is int and n >= 0 for n in sizes):
            raise self.error(f"{what} is no torch.Size")
        return sizes

    def entries(self) -> Iterator[tuple[str, PickleCall]]:
        """Yield the names and their entries, each name once."""
        known = set()
        for name, entry in self._pairs("state_dict_metadata"):
            if not isinstance(name, str) or name in known:
                raise self.error(f"the name {shown(name)} is no text, or occurs twice")
            if not isinstance(entry, PickleCall) or str(entry.of) not in (_TENSOR, _VALUE):
                raise self.error(f"{name!r} is neither a tensor nor a value")
            known.add(name)
            yield name, entry

    def tensor(
        self, name: str, entry: PickleCall
    ) -> tuple[tuple[int, ...], str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Return shape, dtype, and for each chunk its offsets and sizes."""
        properties = self._field(entry, "properties")
        state = properties.state if isinstance(properties, PickleCall) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, PickleGlobal) or str(dtype) not in DTYPES:
            raise self.error(f"{name!r} has no dtype that is known here")
        chunks = self._field(entry, "chunks")
        if not isinstance(chunks, list) or not all(isinstance(one, PickleCall) for one in chunks):
            raise self.error(f"{name!r} has no list of chunks")
        places = [
            tuple(self._sizes(self._field(one, key), f"{key} of a chunk of {name!r}")
                  for key in ("offsets", "sizes"))
            for one in chunks
        ]  # fmt: skip
        shape = self._sizes(self._field(entry, "size"), f"the size of {name!r}")
        for offsets, sizes in places:
            if not len(offsets) == len(sizes) == len(shape):
                raise self.error(f"a chunk of {name!r} does not have the dims of the tensor")
        return shape, DTYPES[str(dtype)], [(offsets, sizes) for offsets, sizes in places]

    def places(self) -> Iterator[tuple[tuple[str, tuple[int, ...] | None], _Place]]:
        """Yield (name, offsets) of each chunk, or (name, None) of a value, and its place."""
        for key, info in self._pairs("storage_data"):
            if (
                not isinstance(key, PickleCall)
                or str(key.of) != _INDEX
                or not isinstance(info, PickleCall)
            ):
                raise self.error("its storage_data names no places")
            name, offsets = self._field(key, "fqn"), self._field(key, "offset", None)
            file = self._field(info, "relative_path")
            numbers = [self._field(info, field) for field in ("offset", "length")]
            if self._field(info, "transform_descriptors", None):
                raise self.error(f"{shown(name)} was transformed when it was written")
            are_plain = isinstance(name, str) and isinstance(file, str)
            if not are_plain or not all(type(n) is int and n >= 0 for n in numbers):
                raise self.error(f"the place of {shown(name)} is invalid")
            at = None if offsets is None else self._sizes(offsets, f"the offset of {name!r}")
            yield (name, at), _Place(file, *numbers)
