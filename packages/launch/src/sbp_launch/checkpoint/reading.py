"""Read slices of the tensors in a checkpoint, and verify checksums while reading.

    pieces in the files          slice of a rank

    +-------+-------+            . . . . . . . .
    |   0   |   1   |            . +-------+ . .      reads pieces 0, 1 and 2, whole, one at a time,
    +-------+-------+            . |       | . .      compares their checksums, and copies the
    |   2   |   3   |            . +-------+ . .      intersections
    +-------+-------+            . . . . . . . .

A piece that is needed whole is read directly into its target; other pieces go through one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from sbp_core.boxing import Bounds
from sbp_core.errors import ConfigError
from sbp_core.plugins import CheckpointStorage
from sbp_launch.checkpoint.cover import index_of
from sbp_launch.checkpoint.manifest import (
    ANOTHER,
    CheckpointManifest,
    DamagedError,
    SavedPiece,
    SavedTensor,
    read_manifest,
)
from sbp_launch.checkpoint.tensors import StoredTensors, bytes_of

#: Largest number of files that are open at a time.
_MOST_FILES = 64


class Checkpoint(StoredTensors):
    """The states of a checkpoint: a mapping whose tensors are read and verified on access.

    Attributes:
        manifest: The manifest of the checkpoint.

    Args:
        storage: The storage of the checkpoint.
        name: Name of its folder.

    Raises:
        DamagedError: its manifest or a file is missing or damaged, or a file has another size.
    """

    def __init__(self, storage: CheckpointStorage, name: str) -> None:
        self._storage, self.name = storage, name
        self._open: dict[str, BinaryIO] = {}
        self._buffer = bytearray()
        self.manifest: CheckpointManifest = read_manifest(storage, name)
        self.stored = self.manifest.tensors
        try:
            sizes = storage.sizes(name)
        except OSError as error:
            what = f"its files cannot be listed: {error.strerror or error}"
            raise self._damage_error("", what) from error
        with self:
            for file, saved in self.manifest.files.items():
                if file not in sizes:
                    raise self._damage_error(file, "the file is missing")
                if (size := sizes[file]) != saved.size_bytes:
                    what = f"the file has {size:,} bytes, not {saved.size_bytes:,}"
                    raise self._damage_error(file, what)
                header = bytearray(saved.header_bytes)
                self._fill(file, 0, memoryview(header))
                self._compare(file, "its header", header, saved.xxh3_128)

    def read(self, name: str, piece: SavedPiece, bounds: Bounds, target: Tensor) -> None:
        """Read a part of a piece into a tensor; `bounds` are relative to the piece.

        Raises:
            DamagedError: the piece is damaged.
        """
        shape = tuple(stop - start for start, stop in piece.bounds)
        if tuple(target.shape) == shape and target.is_contiguous():
            self._fill_piece(name, piece, bytes_of(target))
        else:
            held = self._whole_piece(name, self.manifest.tensors[name], piece)
            target.copy_(held[index_of(bounds)])

    @property
    def place(self) -> str:
        """Path or address of the checkpoint, for messages."""
        return self._storage.place(self.name)

    def verify(
        self, tell: Callable[[int], None] = lambda _: None, share: tuple[int, int] = (0, 1)
    ) -> None:
        """Read everything, or a share of it.

        Args:
            tell: Called with the bytes of every piece that was read.
            share: (index, count): read one of `count` shares of about equal bytes.

        Raises:
            DamagedError: something is damaged; the message names the file and the tensor.
        """
        index, count = share
        pieces = [
            (name, saved, piece)
            for name, saved in self.manifest.tensors.items()
            for piece in saved.pieces
        ]
        total = sum(saved.piece_bytes(piece) for _, saved, piece in pieces)
        before = 0
        for name, saved, piece in pieces:
            size_bytes = saved.piece_bytes(piece)
            if min(count - 1, before * count // max(1, total)) == index:
                self._whole_piece(name, saved, piece)
                tell(size_bytes)
            before += size_bytes

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole_piece(self, name: str, saved: SavedTensor, piece: SavedPiece) -> Tensor:
        """Return a whole piece; it uses the buffer of this checkpoint."""
        size = saved.piece_bytes(piece)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        self._fill_piece(name, piece, view)
        dtype = getattr(torch, saved.dtype)
        shape = [stop - start for start, stop in piece.bounds]
        return torch.frombuffer(view, dtype=dtype).reshape(shape) if size else torch.empty(shape)

    def _fill_piece(self, name: str, piece: SavedPiece, into: memoryview) -> None:
        self._fill(piece.file, piece.offset, into)
        what = f"tensor {name!r} (bytes {piece.offset:,} to {piece.offset + len(into):,})"
        self._compare(piece.file, what, into, piece.xxh3_128)

    def _fill(self, file: str, offset: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a file.

        Raises:
            DamagedError: they cannot be read, or the file is too short.
        """
        try:
            if file not in self._open:
                if len(self._open) >= _MOST_FILES:
                    self.close()
                self._open[file] = self._storage.open(self.name, file)
            opened = self._open[file]
            opened.seek(offset)
            done = 0
            while done < len(into):
                count = opened.readinto(into[done:])  # type: ignore[attr-defined] # of raw files
                if not count:
                    raise self._damage_error(file, f"the file ends after {offset + done:,} bytes")
                done += count
        except OSError as error:
            raise self._damage_error(
                file, f"the file cannot be read: {error.strerror or error}"
            ) from error

    def _compare(self, file: str, what: str, data: bytearray | memoryview, wanted: str) -> None:
        found = xxh3_128_hexdigest(data)
        if found != wanted:
            raise self._damage_error(file, f"the xxh3_128 of {what} is {found}, not {wanted}")

    def _damage_error(self, file: str, what: str) -> DamagedError:
        return DamagedError(
            f"the checkpoint {self.name} is damaged: {what}",
            where=self._storage.place(self.name, file),
            accepted="files as they were written",
            todo=ANOTHER,
        )


def none_is_whole(storage: CheckpointStorage, count: int) -> ConfigError:
    """Return the error for a storage whose checkpoints are all damaged."""
    return ConfigError(
        f"none of the {count} checkpoints is whole",
        where=storage.place(),
        accepted="a checkpoint that verifies",
        todo="start again, in another folder",
    )
