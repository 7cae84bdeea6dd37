"""The manifest of a checkpoint: an index of the pieces of all tensors, and the run's position.

It is a JSON document with a version. Its last line is a checksum of all bytes before it. It also
has checksums of the header and of all pieces of each file. Together the checksums cover every byte
of the checkpoint, so any flipped byte is found.

    {
      "format": "sbp-checkpoint",
      "version": 1,
      "metadata": {"step": 100, "seed": 0, ...},
      "tensors": {
        "layers.0.weight": {"shape": [8, 4], "dtype": "float32", "pieces": [
          {"file": "rank-00000.safetensors", "offset": 472, "bounds": [[0, 4], [0, 4]], ...},
          {"file": "rank-00001.safetensors", "offset": 472, "bounds": [[4, 8], [0, 4]], ...}]},
        ...},
      "files": {
        "rank-00000.safetensors": {"size_bytes": 600, "header_bytes": 472, ...},
        ...},
      "xxh3_128": "5d41402abc4b2a76b9719d911017c592"
    }

A manifest is untrusted input: it is validated before memory is allocated or a file is opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from xxhash import xxh3_128_hexdigest

from sbp_core.boxing import Bounds, itemsize
from sbp_core.errors import ConfigError
from sbp_core.plugins import CheckpointStorage
from sbp_core.serialize import Document, parse, shown
from sbp_launch.checkpoint.cover import MOST_DIMS, bounds_text, can_be, covers
from sbp_launch.checkpoint.folder_storage import MANIFEST_FILE
from sbp_launch.checkpoint.steps import step_name, step_of

#: Largest size of a piece in bytes, and so of a read buffer.
MAX_PIECE_BYTES = 64 * 2**20

#: Largest size of a manifest in bytes: about 400,000 pieces.
MAX_MANIFEST_BYTES = 64 * 2**20

#: Advice in messages about a damaged checkpoint.
ANOTHER = "take another checkpoint; sbp-checkpoint verify FOLDER says which are whole"
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")
_CHECKSUM = re.compile("[0-9a-f]{32}")
_LAST_LINE = re.compile(rb',\n"xxh3_128": "([0-9a-f]{32})"\}\n')


class DamagedError(ConfigError):
    """The error for a checkpoint that was changed after it was written; another may be intact."""


def _refuse(what: str, accepted: str) -> None:
    raise ConfigError(what, accepted=accepted)


_damaged = partial(DamagedError, todo=ANOTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPiece:
    """A slice of a tensor, stored as one contiguous range of bytes of a file.

    Args:
        file: Name of the file in the folder of the checkpoint.
        offset: Position of the first byte in the file.
        bounds: The slice: (start, stop) of each dim.
        xxh3_128: Checksum of its bytes, which are row-major and little-endian.
    """

    file: str
    offset: int
    bounds: Bounds
    xxh3_128: str

    def __post_init__(self) -> None:
        if not _FILE.fullmatch(self.file):
            _refuse(f"file={self.file!r} is no file of a checkpoint", "rank-00000.safetensors")
        if self.offset < 0:
            _refuse(f"offset={self.offset} is negative", "the first byte of the piece, >= 0")
        if any(not 0 <= start <= stop for start, stop in self.bounds):
            _refuse(f"bounds={self.bounds} is no slice", "0 <= start <= stop in each dim")
        _check_checksum(self.xxh3_128)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor as pieces that cover it, each element once.

    Args:
        shape, dtype: Shape and dtype of the whole tensor.
        pieces: Its pieces, of at most 64 MiB each, in any files.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[SavedPiece, ...]

    def __post_init__(self) -> None:
        if not can_be(self.shape):
            _refuse(
                f"shape={shown(list(self.shape))} is none",
                f"at most {MOST_DIMS} dims, none negative, and less than 2**60 elements",
            )
        size = itemsize(self.dtype)
        for piece in self.pieces:
            bounds = piece.bounds
            if len(bounds) != len(self.shape) or any(
                stop > extent for (_, stop), extent in zip(bounds, self.shape, strict=True)
            ):
                _refuse(
                    f"pieces reach beyond shape={list(self.shape)}: {bounds_text(bounds)}",
                    "slices of the tensor",
                )
            if size * prod(stop - start for start, stop in bounds) > MAX_PIECE_BYTES:
                _refuse(f"pieces are too large: {bounds_text(bounds)}", "at most 64 MiB each")

    def piece_bytes(self, piece: SavedPiece) -> int:
        """Return the size of one of the pieces in bytes."""
        return itemsize(self.dtype) * prod(stop - start for start, stop in piece.bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file: a header, followed by pieces without gaps.

    Args:
        size_bytes: Size of the whole file.
        header_bytes: Size of the header, which ends at the first piece.
        xxh3_128: Checksum of the header.
    """

    size_bytes: int
    header_bytes: int
    xxh3_128: str

    def __post_init__(self) -> None:
        if not 0 <= self.header_bytes <= self.size_bytes:
            _refuse(
                f"header_bytes={self.header_bytes} of size_bytes={self.size_bytes}",
                "0 <= header_bytes <= size_bytes",
            )
        if self.header_bytes > MAX_MANIFEST_BYTES:
            _refuse(f"header_bytes={self.header_bytes} is too much", "at most 64 MiB")
        _check_checksum(self.xxh3_128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The position of a run, and its description.

    Args:
        step: Number of updates done, >= 0.
        seed: Seed of random numbers in the step.
        cursor: Position in the data, in the format of `sbp_launch.data`.
        trainer: State of the trainer between steps, in its own format.
        settings: Settings of the update and the schedule, by key; a resumed run should share them.
        graph_hash: Hash of the captured step.
        config_hash: Hash of the settings at the start of the run, except settings of printing.
        versions: Versions of Python and packages, by name.
    """

    step: int
    seed: int
    cursor: Any = None
    trainer: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    graph_hash: str = ""
    config_hash: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.step < 0:
            _refuse(f"step={self.step} is negative", "the number of updates done, >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The contents of a checkpoint, except the bytes of its tensors.

    Args:
        metadata: The position of the run.
        tensors: Tensors by name, as in `Session.state_dict`.
        files: Files by name.
    """

    metadata: Metadata
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.size_bytes for file in self.files.values())


#: JSON format of a manifest, and of the part of it that each process writes about its own file.
MANIFEST = Document(
    kind=CheckpointManifest, format="sbp-checkpoint", version=1, todo=ANOTHER, error=DamagedError
)


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """Return a manifest as the bytes of its file, with its checksum."""
    dumps = partial(json.dumps, allow_nan=False)

    def lines(value: Any) -> str:
        """Return JSON with a line for each entry of a mapping."""
        if not isinstance(value, dict):
            return dumps(value)
        parts = [f"{json.dumps(key)}: {dumps(one)}" for key, one in value.items()]
        return "{\n" + ",\n".join(parts) + "\n}" if parts else "{}"

    value = MANIFEST.dump(manifest)
    body = "{" + ",\n".join(f"{json.dumps(key)}: {lines(part)}" for key, part in value.items())
    return f'{body},\n"xxh3_128": "{xxh3_128_hexdigest(body.encode())}"}}\n'.encode()


def parse_manifest(data: bytes, where: str, *, is_whole: bool = True) -> CheckpointManifest:
    """Parse the output of `manifest_bytes`.

    Args:
        data: Bytes of the file.
        where: Name of the file, for messages.
        is_whole: Whether it is the manifest of a checkpoint; False for the file of one process.

    Raises:
        DamagedError: it was changed, has another version, or is invalid.
    """
    last, accepted = _LAST_LINE.search(data, max(0, len(data) - 64)), "a manifest as it was written"
    if last is None or last.end() != len(data):
        raise _damaged("the manifest does not end in its checksum", where=where, accepted=accepted)
    body = data[: last.start()]
    found = xxh3_128_hexdigest(body)
    if found != last[1].decode():
        what = f"the manifest is damaged: its xxh3_128 is {found}, not {last[1].decode()}"
        raise _damaged(what, where=where, accepted=accepted)
    try:
        text = f"{body.decode()}}}"
    except UnicodeDecodeError as error:
        raise DamagedError("the manifest is no text", where=where, accepted="UTF-8") from error
    manifest = MANIFEST.load(parse(text, where=where, error=DamagedError, todo=ANOTHER), where)
    _check_together(manifest, where, is_whole=is_whole)
    return manifest


def read_manifest(storage: CheckpointStorage, name: str) -> CheckpointManifest:
    """Return the manifest of a checkpoint.

    Raises:
        DamagedError: it is missing or damaged.
    """
    place = storage.place(name, MANIFEST_FILE)
    try:
        with storage.open(name, MANIFEST_FILE) as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise _damaged(
            f"the checkpoint {name} cannot be read: {error.strerror or error}", where=place
        ) from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise DamagedError("the manifest is too large", where=place, accepted="at most 64 MiB")
    manifest = parse_manifest(data, place)
    if step_of(name) not in (None, manifest.metadata.step):
        raise DamagedError(
            f"the checkpoint {name} is of step {manifest.metadata.step}",
            where=place,
            accepted=f"the name {step_name(manifest.metadata.step)}",
            todo="restore its name, or take another checkpoint",
        )
    return manifest


def _check_together(manifest: CheckpointManifest, where: str, *, is_whole: bool) -> None:
    """Check that pieces cover the tensors, and fill the files after their headers.

    Raises:
        DamagedError: they do not.
    """
    runs_of: dict[str, list[tuple[int, int]]] = {name: [] for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for number, piece in enumerate(tensor.pieces):
            if piece.file not in runs_of:
                raise _damaged(
                    f"tensors.{name}.pieces[{number}].file is {piece.file!r}",
                    where=where,
                    accepted=f"one of files: {', '.join(list(runs_of)[:3])}",
                )
            runs_of[piece.file].append((piece.offset, tensor.piece_bytes(piece)))
        if is_whole and not covers([piece.bounds for piece in tensor.pieces], tensor.shape):
            raise _damaged(
                f"tensors.{name}.pieces do not make up the tensor of shape {list(tensor.shape)}",
                where=where,
                accepted="pieces that have each element once",
            )
    for file_name, runs in runs_of.items():
        file = manifest.files[file_name]
        if not _FILE.fullmatch(file_name):
            raise _damaged(
                f"files has {file_name!r}, no file of a checkpoint",
                where=where,
                accepted="names such as rank-00000.safetensors",
            )
        at = file.header_bytes
        for offset, size in sorted(runs):
            if offset != at:
                break
            at += size
        if at == file.size_bytes:
            continue
        raise _damaged(
            f"files.{file_name}: its pieces do not make up its bytes {file.header_bytes} to "
            f"{file.size_bytes}",
            where=where,
            accepted="pieces one after the other, from the header to the end",
        )


def _check_checksum(text: str) -> None:
    if not _CHECKSUM.fullmatch(text):
        _refuse(f"xxh3_128={text!r} is no checksum", "32 hexadecimal digits")
