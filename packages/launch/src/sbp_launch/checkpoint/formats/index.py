"""Where the tensors of files lie: names, shapes, dtypes, and the bytes of every piece.

What a format says is read into a `TensorIndex`, without torch, and everything in it is checked
against the files before memory is taken. What reads tensors (`indexed`) knows this only.
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

#: Bytes of one element, of the dtypes that files hold; more than those that graphs compute in.
ITEMSIZE = {
    **graph.ITEMSIZE,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "uint64": 8, "uint32": 4, "uint16": 2,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A slice of a tensor, as it is in a file.

    Args:
        file: Its name in the folder of the index.
        offset: Of its first element, in bytes.
        bounds: Where it is in the tensor: (start, stop) of each dim.
        strides: Elements between neighbours of each dim; row-major if None.
    """

    file: str
    offset: int
    bounds: Bounds
    strides: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dim."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def span(self) -> int:
        """Elements from the first one to the last one, as they are in the file."""
        if not volume(self.bounds):
            return 0
        if self.strides is None:
            return volume(self.bounds)
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in files: its pieces hold each of its elements once."""

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
        path: What was opened: a file, or a folder.
        folder: That the files of the pieces are in.
        tensors: By name.
        notes: What else it says of itself, by key.
        others: What it has that is no tensor, by name; in words.
    """

    path: Path
    folder: Path
    tensors: Mapping[str, StoredTensor]
    notes: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that pieces are in, in order of name."""
        return tuple(sorted({p.file for tensor in self.tensors.values() for p in tensor.pieces}))

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def checked(self) -> TensorIndex:
        """Return the index, which fits its files.

        Raises:
            ConfigError: it does not.
        """
        sizes = {
            name: inner_path(self.folder, name, self.path).stat().st_size for name in self.files
        }
        for name, tensor in self.tensors.items():
            check_tensor(name, tensor, sizes, self.path)
        return self


def check_tensor(name: str, tensor: StoredTensor, sizes: Mapping[str, int], path: Path) -> None:
    """Check a tensor against the files that it is in, of some sizes in bytes; `path` is named.

    Raises:
        ConfigError: it has a shape or dtype that no tensor has, a piece is outside of its file,
            or its pieces do not hold each element once.
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
            raise error(what, accepted="elements of their own: no more than bytes of the file")
        end = piece.offset + piece.span * ITEMSIZE[tensor.dtype]
        if piece.offset < 0 or end > sizes[piece.file]:
            raise error(
                f"{name!r} is at bytes {piece.offset} to {end} of {piece.file}, which has "
                f"{sizes[piece.file]}",
                todo="the file is damaged, or was cut: get it again",
            )
    slices = [piece.bounds for piece in tensor.pieces if volume(piece.bounds)]
    if not covers(slices, shape):
        raise error(
            f"{name!r} of shape {shape} is not made up by its pieces: "
            f"{', '.join(map(bounds_text, slices[:3])) or 'none'}{', ...' * (len(slices) > 3)}",
            accepted="pieces that hold each element once",
        )


def check_shape(name: str, shape: Sequence[int], dtype: str, path: Path) -> None:
    """Check that a tensor can be.

    Raises:
        ConfigError: it has a dtype that is unknown here, too many dims, or too many elements.
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
    """Return the path of a file that an index names, which is in its folder.

    Args:
        folder: Of the index.
        name: Of the file, as the index has it.
        source: What names it, for messages.

    Raises:
        ConfigError: the name leads out of the folder, or there is no such file.
    """
    home, inner = folder, name
    # The hub's cache has its files in `blobs`, and links to them in `snapshots/REVISION`.
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
