"""The tensors of an index, read when they are asked for, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from io import FileIO
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from sbp_core.errors import ConfigError
from sbp_launch.checkpoint.formats.index import StoredPiece, TensorIndex, inner_path

#: Bytes that are read at once, at most, of what lies in rows; the buffer that a reader holds.
BLOCK_BYTES = 8 << 20


class Tensors(Protocol):
    """A mapping of tensors that reads them when they are asked for, whole or in parts."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...

    def __contains__(self, name: object, /) -> bool: ...

    def like(self, name: str) -> Tensor:
        """Return a tensor of the shape and dtype, without values: on the device `meta`."""

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part, a tensor of its own: (start, stop) of each dim."""


class IndexedTensors(Mapping[str, Tensor]):
    """The tensors of files.

    A tensor is read piece by piece, through a buffer of `BLOCK_BYTES`; a piece that does not lie in
    rows is read whole.

    Args:
        index: Where they lie; checked.
    """

    def __init__(self, index: TensorIndex) -> None:
        self.index = index

    def __getitem__(self, name: str) -> Tensor:
        shape = self.index.tensors[name].shape
        return self.part(name, [(0, extent) for extent in shape])

    def __iter__(self) -> Iterator[str]:
        return iter(self.index.tensors)

    def __len__(self) -> int:
        return len(self.index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.index.tensors  # that of `Mapping` reads the tensor

    def like(self, name: str) -> Tensor:
        """Return a tensor of the shape and dtype, without values: on the device `meta`."""
        stored = self.index.tensors[name]
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part, a tensor of its own: (start, stop) of each dim.

        Raises:
            ConfigError: a file is gone, or shorter than when it was opened.
        """
        stored = self.index.tensors[name]
        assert len(bounds) == len(stored.shape), f"{name}: {bounds} of {stored.shape}"
        shape = [stop - start for start, stop in bounds]
        found = torch.empty(shape, dtype=getattr(torch, stored.dtype))
        with ExitStack() as files:
            for piece in stored.pieces:
                common = [
                    (max(a, c), min(b, d))
                    for (a, b), (c, d) in zip(piece.bounds, bounds, strict=True)
                ]
                if any(start >= stop for start, stop in common):
                    continue
                path = inner_path(self.index.folder, piece.file, self.index.path)
                file = files.enter_context(path.open("rb", buffering=0))
                target = found[_slices(common, bounds)]
                _read(file, piece, _moved(common, piece.bounds), target, name)
        return found


def _moved(
    bounds: Sequence[tuple[int, int]], origin: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return bounds as seen from the beginning of others."""
    pairs = zip(bounds, origin, strict=True)
    return [(start - first, stop - first) for (start, stop), (first, _) in pairs]


def _slices(
    bounds: Sequence[tuple[int, int]], origin: Sequence[tuple[int, int]]
) -> tuple[slice, ...]:
    return tuple(slice(*dim) for dim in _moved(bounds, origin))


def _read(
    file: FileIO, piece: StoredPiece, bounds: Sequence[tuple[int, int]], target: Tensor, name: str
) -> None:
    """Read a part of a piece into a tensor; `bounds` are those within the piece."""
    if piece.strides is None:
        _read_rows(file, piece.offset, piece.shape, bounds, target, name)
        return
    whole = _read_flat(file, piece.offset, piece.span, target.dtype, name)
    view = whole.as_strided(piece.shape, piece.strides)
    target.copy_(view[tuple(slice(*dim) for dim in bounds)])


def _read_rows(
    file: FileIO,
    offset: int,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    target: Tensor,
    name: str,
) -> None:
    """Read a part of what lies in rows: as many whole rows at once as a block holds."""
    size = target.element_size()
    row = prod(shape[1:])
    if not shape:
        target.copy_(_read_flat(file, offset, 1, target.dtype, name)[0])
        return
    start, stop = bounds[0]
    if row * size > BLOCK_BYTES:
        for at in range(start, stop):
            inner = offset + at * row * size
            _read_rows(file, inner, shape[1:], bounds[1:], target[at - start], name)
        return
    count = max(1, BLOCK_BYTES // (row * size))
    if target.is_contiguous() and target.shape[1:] == tuple(shape[1:]):
        _fill(file, offset + start * row * size, target, name)  # whole rows, without a buffer
        return
    inside = tuple(slice(*dim) for dim in bounds[1:])
    for at in range(start, stop, count):
        rows = min(count, stop - at)
        flat = _read_flat(file, offset + at * row * size, rows * row, target.dtype, name)
        target[at - start : at - start + rows].copy_(flat.view(rows, *shape[1:])[:, *inside])


def _read_flat(file: FileIO, offset: int, count: int, dtype: torch.dtype, name: str) -> Tensor:
    """Read elements that lie one behind the other."""
    found = torch.empty(count, dtype=dtype)
    _fill(file, offset, found, name)
    return found


def _fill(file: FileIO, offset: int, target: Tensor, name: str) -> None:
    """Read as many bytes as a contiguous tensor has into it.

    Raises:
        ConfigError: the file ends before.
    """
    view = target.reshape(-1).view(torch.uint8).numpy().data
    filled = 0
    file.seek(offset)
    while filled < len(view):
        got = file.readinto(view[filled:])
        if not got:
            raise ConfigError(
                f"the file ends within {name!r}, at byte {offset + filled}",
                where=str(file.name),
                todo="it was changed while it was read: try again, or get it again",
            )
        filled += got


class Chosen(Mapping[str, Tensor]):
    """Some of the tensors of a mapping, perhaps under other names.

    Args:
        tensors: Where they are.
        names: Name there, by name here; `sources` of what this makes.
    """

    def __init__(self, tensors: Tensors, names: Mapping[str, str]) -> None:
        self._tensors, self.sources = tensors, dict(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self.sources[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    def __contains__(self, name: object) -> bool:
        return name in self.sources

    def like(self, name: str) -> Tensor:
        """Return a tensor of the shape and dtype, without values: on the device `meta`."""
        return self._tensors.like(self.sources[name])

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part, a tensor of its own: (start, stop) of each dim."""
        return self._tensors.part(self.sources[name], bounds)
