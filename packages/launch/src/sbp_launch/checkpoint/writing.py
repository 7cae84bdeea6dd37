"""Write the pieces of each process into a safetensors file, and commit the files as a checkpoint.

    every process    staged/rank-00001.safetensors   its pieces, streamed and hashed block by block
                     staged/rank-00001.json          the index of its file
    the first one    manifest.json                   all indices in one; this commits

A safetensors file has eight bytes with the length of the header, the header, and tensors without
gaps. A piece that is not the whole state is named with its slice: `weight[0:4, 0:8]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from sbp_core.boxing import Bounds, itemsize
from sbp_core.errors import SbpValueError
from sbp_core.plugins import StagedFolder
from sbp_core.runtime import Snapshot, StatePiece, StateSlice
from sbp_launch.checkpoint.cover import bounds_text, index_of, split_into_blocks
from sbp_launch.checkpoint.folder_storage import MANIFEST_FILE
from sbp_launch.checkpoint.formats.safetensors_file import CODES
from sbp_launch.checkpoint.manifest import (
    CheckpointManifest,
    Metadata,
    SavedFile,
    SavedPiece,
    SavedTensor,
    manifest_bytes,
    parse_manifest,
)
from sbp_launch.checkpoint.tensors import bytes_of, dtype_name

#: Bytes that are hashed and written at a time; also the size of a piece that is verified.
BLOCK_BYTES = 8 * 2**20

#: Names of dtypes in safetensors. It has no complex128: each element is two float64.
_CODES = {**CODES, "complex128": "F64"}


def states_file(rank: int) -> str:
    """Return the name of the file of states of a process, by its lowest rank."""
    return f"rank-{rank:05d}.safetensors"


def part_file(rank: int) -> str:
    """Return the name of the temporary index of a process's file, used until the commit."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A piece to be written, with its place in the file."""

    piece: StateSlice
    offset: int  # from the end of the header
    size_bytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.piece.bounds)

    @property
    def name(self) -> str:
        piece = self.piece
        if self.shape == piece.shape:
            return piece.name
        return piece.name + bounds_text(piece.bounds)

    def header(self) -> dict[str, object]:
        shape = [*self.shape, 2] if self.piece.dtype == "complex128" else list(self.shape)
        place = [self.offset, self.offset + self.size_bytes]
        return {"dtype": _CODES[self.piece.dtype], "shape": shape, "data_offsets": place}


def place_of(one: StateSlice) -> tuple[int, str, Bounds]:
    """Return the key of the order in a file: large elements first, so that all are aligned."""
    return -itemsize(one.dtype), one.name, one.bounds


def write_part(
    staged: StagedFolder, rank: int, metadata: Metadata, pieces: Iterable[StatePiece] | Snapshot
) -> int:
    """Write the pieces of a process, and their index, into a folder; return the bytes of the file.

    Both files are durable when this returns. It needs memory for the pieces, and for a block of
    8 MiB if they are on a device or not contiguous. A snapshot is written in its own order.

    Args:
        staged: The folder.
        rank: The lowest rank of this process.
        metadata: The position of the run.
        pieces: The pieces; of a snapshot, all are written.

    Raises:
        OSError: they cannot be written.
        RunError: see `Snapshot.pieces`.
    """
    slices: Sequence[StateSlice]
    values: Iterator[StatePiece]
    if isinstance(pieces, Snapshot):
        slices, values = pieces.slices(), pieces.pieces()
    else:
        found = sorted(pieces, key=place_of)
        slices, values = found, iter(found)
    entries, offset = [], 0  # with their places, one after the other
    for one in slices:
        size = itemsize(one.dtype) * prod(stop - start for start, stop in one.bounds)
        entries.append(_Entry(piece=one, offset=offset, size_bytes=size))
        offset += size
    header = json.dumps({entry.name: entry.header() for entry in entries}).encode()
    header += b" " * (-len(header) % 8)
    start = len(header).to_bytes(8, "little") + header
    name, size_bytes = states_file(rank), len(start)
    tensors: dict[str, SavedTensor] = {}
    if entries:
        with staged.create(name) as file:
            file.write(start)
            for entry in entries:
                # No variable for the piece: it would keep its memory during the wait for the next.
                blocks = _write_piece(file, name, size_bytes, next(values))
                size_bytes += entry.size_bytes
                saved, known = entry.piece, tensors.get(entry.piece.name)
                pieces_of = (*known.pieces, *blocks) if known else tuple(blocks)
                tensors[saved.name] = SavedTensor(
                    shape=saved.shape, dtype=saved.dtype, pieces=pieces_of
                )
    files = {
        name: SavedFile(
            size_bytes=size_bytes, header_bytes=len(start), xxh3_128=xxh3_128_hexdigest(start)
        )
    }
    part = CheckpointManifest(metadata=metadata, tensors=tensors, files=files if entries else {})
    with staged.create(part_file(rank)) as file:
        file.write(manifest_bytes(part))
    return size_bytes if entries else 0


def commit(staged: StagedFolder, ranks: Sequence[int]) -> CheckpointManifest:
    """Commit the files that all processes have written as a checkpoint; one process calls this.

    Args:
        staged: The folder.
        ranks: The lowest rank of each process, as in `write_part`.

    Raises:
        OSError: it cannot be committed.
        DamagedError: the index of a process was changed.
    """
    tensors: dict[str, SavedTensor] = {}
    files: dict[str, SavedFile] = {}
    metadata: Metadata | None = None
    for rank in ranks:
        with staged.open(part_file(rank)) as file:
            part = parse_manifest(file.read(), part_file(rank), is_whole=False)
        metadata = metadata or part.metadata
        files |= part.files
        for name, tensor in part.tensors.items():
            known = tensors.get(name)
            pieces = (*known.pieces, *tensor.pieces) if known else tensor.pieces
            tensors[name] = replace(tensor, pieces=pieces)
    assert metadata is not None, "a run has a process"
    manifest = CheckpointManifest(
        metadata=metadata, tensors=dict(sorted(tensors.items())), files=files
    )
    data = manifest_bytes(manifest)
    parse_manifest(data, MANIFEST_FILE)  # a manifest that cannot be read must not be committed
    staged.commit(MANIFEST_FILE, data, list(files))
    return manifest


def _write_piece(file: BinaryIO, name: str, offset: int, piece: StatePiece) -> list[SavedPiece]:
    """Append a piece to a file of a name; return its blocks with their bounds in the state."""
    value, blocks = piece.value, []
    shape = tuple(stop - start for start, stop in piece.bounds)
    dtype = getattr(torch, piece.dtype)
    whole = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
    if tuple(whole.shape) != shape or dtype_name(whole) != piece.dtype:
        raise SbpValueError(
            f"the piece of {piece.name!r} has shape {tuple(whole.shape)} and dtype "
            f"{dtype_name(whole)}",
            accepted=f"shape {shape} and dtype {piece.dtype}, as its bounds say",
        )
    for block in split_into_blocks(shape, itemsize(piece.dtype), BLOCK_BYTES):
        moved = zip(piece.bounds, block, strict=True)
        bounds = tuple((start + first, start + last) for (start, _), (first, last) in moved)
        data = bytes_of(whole[index_of(block)])
        digest = xxh3_128_hexdigest(data)
        file.write(data)
        blocks.append(SavedPiece(file=name, offset=offset, bounds=bounds, xxh3_128=digest))
        offset += len(data)
    return blocks
