"""Index of tensors in files: names, shapes, dtypes, and the byte range of every piece.

The reader of each format produces a `TensorIndex`, without torch. The index is validated against
the sizes of the files before memory is allocated. `indexed` reads tensors by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path

from sbp_core import graph
from sbp_core.boxing import Bounds, volume
from sbp_core.errors import ConfigError, nearest
from sbp_core.serialize import file_within, shown
from sbp_launch.checkpoint.cover import MOST_DIMS, bounds_text, can_be, covers

#: Bytes per element of the dtypes in files; these are more than the dtypes of graphs.
ITEMSIZE = {
    **graph.ITEMSIZE,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "uint64": 8, "uint32": 4, "uint16": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A slice of a tensor in a file.

    Args:
        file: Name of the file in the folder of the index.
        offset: Position of the first element in bytes.
        bounds: The slice: (start, stop) of each dim.
        strides: Strides in elements; None for row-major.
    """

    file: str
    offset: int
    bounds: Bounds
    strides: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def span(self) -> int:
        """Number of elements in the file from the first to the last, including gaps."""
        if not volume(self.bounds):
            return 0
        if self.strides is None:
            return volume(self.bounds)
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in files; its pieces cover it, each element once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """All tensors of a file or a folder.

    Args:
        path: The file or the folder that was opened.
        folder: The folder with the files of the pieces.
        tensors: Tensors by name.
        notes: Further metadata, by key.
        others: Entries that are not tensors, by name; in words.
    """

    path: Path
    folder: Path
    tensors: Mapping[str, StoredTensor]
    notes: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files with pieces, sorted."""
        return tuple(sorted({p.file for tensor in self.tensors.values() for p in tensor.pieces}))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def validate(self) -> TensorIndex:
        """Return the index after validating it against its files.

        Raises:
            ConfigError: it does not fit them.
        """
        sizes = {
            name: inner_path(self.folder, name, self.path).stat().st_size for name in self.files
        }
        for name, tensor in self.tensors.items():
            check_tensor(name, tensor, sizes, self.path)
        return self


def check_tensor(name: str, tensor: StoredTensor, sizes: Mapping[str, int], path: Path) -> None:
    """Check a tensor against the sizes of its files in bytes; `path` is for messages.

    Raises:
        ConfigError: its shape or dtype is invalid, a piece is outside of its file, or the pieces
            do not cover it, each element once.
    """
    shape, error = tensor.shape, partial(ConfigError, where=str(path))
    check_shape(name, shape, tensor.dtype, path)
    for piece in tensor.pieces:
        bounds = piece.bounds
        if len(bounds) != len(shape) or not all(
            0 <= start <= stop <= extent
            for (start, stop), extent in zip(bounds, shape, strict=True)
        ):
            what = f"{name!r} of shape {shape} has a piece {bounds_text(bounds)}"
            raise error(what, accepted="pieces within the tensor")
        if piece.strides is not None and (
            min(piece.strides, default=0) < 0 or volume(bounds) > piece.span
        ):
            what = f"{name!r} of shape {piece.shape} has the strides {piece.strides}"
            raise error(what, accepted="strides >= 0 with which elements do not overlap")
        end = piece.offset + piece.span * ITEMSIZE[tensor.dtype]
        if piece.offset < 0 or end > sizes[piece.file]:
            raise error(
                f"{name!r} is at bytes {piece.offset} to {end} of {piece.file}, which has "
                f"{sizes[piece.file]}",
                todo="the file is damaged, or was cut off: get it again",
            )
    slices = [piece.bounds for piece in tensor.pieces if volume(piece.bounds)]
    if not covers(slices, shape):
        raise error(
            f"the pieces of {name!r} do not make up its shape {shape}: "
            f"{', '.join(map(bounds_text, slices[:3])) or 'none'}{', ...' * (len(slices) > 3)}",
            accepted="pieces that hold each element once",
        )


def check_shape(name: str, shape: Sequence[int], dtype: str, path: Path) -> None:
    """Check the shape and dtype of a tensor.

    Raises:
        ConfigError: the dtype is unknown here, or there are too many dims or elements.
    """
    if dtype not in ITEMSIZE:
        what = f"{name!r} has the dtype {shown(dtype)}"
        raise ConfigError(what, where=str(path), accepted=", ".join(ITEMSIZE))
    if not can_be(shape):
        raise ConfigError(
            f"{name!r} has {len(shape)} dims: {shown(list(shape))}",
            where=str(path),
            accepted=f"at most {MOST_DIMS} dims, none negative, and less than 2**60 elements",
        )


def inner_path(folder: Path, name: str, source: Path) -> Path:
    """Return the path of a file that an index names, and check that it is in the index's folder.

    Args:
        folder: Folder of the index.
        name: Name of the file in the index.
        source: The file that contains the name, for messages.

    Raises:
        ConfigError: the name leads out of the folder, or there is no such file.
    """
    home, inner = folder, name
    # The cache of the Hugging Face hub has files in `blobs`, and links in `snapshots/REVISION`.
    real = folder.resolve()
    if real.parent.name == "snapshots":
        home, inner = real.parent.parent, f"snapshots/{real.name}/{name}"
    path = file_within(home, inner, where=str(source), error=ConfigError)
    if not path.is_file():
        there = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        near = nearest(name, there)
        raise ConfigError(
            f"the file {name} is missing" if not path.exists() else f"{name} is no file",
            where=str(source),
            todo=f"there is {near!r}: was it renamed?" if near else "get it again",
        )
    return path
