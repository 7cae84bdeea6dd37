"""`IndexedTensors`: read tensors of files on demand, whole or in slices, by a `TensorIndex`.

The reader of each format makes the index; `places.open_tensors` opens the tensors with this class.
"""

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

#: Largest size in bytes of the buffer for parts of rows; whole rows need none.
BLOCK_BYTES = 8 << 20


class IndexedTensors(StoredTensors):
    """The tensors of an index, which lists file, offset, bounds and strides of each piece.

    Of row-major pieces, only the rows of the slice are read: whole rows straight into the target,
    parts of rows in blocks of `BLOCK_BYTES`. Pieces with other strides are read whole.

    Args:
        index: A checked index.
    """

    def __init__(self, index: TensorIndex) -> None:
        self.index, self.stored = index, index.tensors

    def read(self, name: str, piece: StoredPiece, bounds: Bounds, target: Tensor) -> None:
        """Read a part of a piece into a tensor; `bounds` are relative to the piece.

        Raises:
            ConfigError: a file is missing, or shorter than when it was opened.
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
    """Read a slice of a row-major piece, as many rows at a time as fit into a block."""
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
    """Read contiguous elements into a new tensor."""
    found = torch.empty(count, dtype=dtype)
    _fill(file, offset, found, name)
    return found


def _fill(file: FileIO, offset: int, target: Tensor, name: str) -> None:
    """Fill a contiguous tensor from a file.

    Raises:
        ConfigError: the file is too short.
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
