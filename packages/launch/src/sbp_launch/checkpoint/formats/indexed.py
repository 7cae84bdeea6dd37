"""The tensors of an index, read when they are asked for, whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from io import FileIO
from math import prod

import torch
from torch import Tensor

from sbp_core.boxing import Bounds
from sbp_core.errors import ConfigError
from sbp_core.serialize import open_file
from sbp_launch.checkpoint.cover import index_of
from sbp_launch.checkpoint.formats.index import StoredPiece, TensorIndex, inner_path
from sbp_launch.checkpoint.tensors import StoredTensors, bytes_of

#: Bytes that are read at once, at most, of what is in rows; the buffer that a reader holds.
BLOCK_BYTES = 8 << 20


class IndexedTensors(StoredTensors):
    """The tensors of files.

    A tensor is read piece by piece, through a buffer of `BLOCK_BYTES`; a piece that is not in
    rows is read whole.

    Args:
        index: Where they lie; checked.
    """

    def __init__(self, index: TensorIndex) -> None:
        self.index, self.stored = index, index.tensors

    def read(self, name: str, piece: StoredPiece, bounds: Bounds, target: Tensor) -> None:
        """Read a part of a piece into a tensor; `bounds` are those within the piece.

        Raises:
            ConfigError: a file is gone, or shorter than when it was opened.
        """
        with open_file(inner_path(self.index.folder, piece.file, self.index.path)) as file:
            if piece.strides is None:
                _read_rows(file, piece.offset, piece.shape, bounds, target, name)
                return
            whole = _read_flat(file, piece.offset, piece.span, target.dtype, name)
            view = whole.as_strided(piece.shape, piece.strides)
            target.copy_(view[index_of(bounds)])


def _read_rows(
    file: FileIO,
    offset: int,
    shape: Sequence[int],
    bounds: Sequence[tuple[int, int]],
    target: Tensor,
    name: str,
) -> None:
    """Read a part of what is in rows: as many whole rows at once as a block holds."""
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
    inside = index_of(bounds[1:])
    for at in range(start, stop, count):
        rows = min(count, stop - at)
        flat = _read_flat(file, offset + at * row * size, rows * row, target.dtype, name)
        target[at - start : at - start + rows].copy_(flat.view(rows, *shape[1:])[:, *inside])


def _read_flat(file: FileIO, offset: int, count: int, dtype: torch.dtype, name: str) -> Tensor:
    """Read elements that are one after the other."""
    found = torch.empty(count, dtype=dtype)
    _fill(file, offset, found, name)
    return found


def _fill(file: FileIO, offset: int, target: Tensor, name: str) -> None:
    """Read as many bytes as a contiguous tensor has into it.

    Raises:
        ConfigError: the file ends before.
    """
    view = bytes_of(target)
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
