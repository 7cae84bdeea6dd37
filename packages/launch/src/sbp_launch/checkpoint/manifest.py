"""The manifest of a checkpoint: which piece of which tensor lies where, and where the run was.

It is a JSON document of one version. Its last line has the checksum of all bytes before it, and it
has the checksum of every other byte of the checkpoint: of the header of each file, and of each
piece, which together are the whole file. So a flipped byte is found wherever it is.

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

A manifest comes from elsewhere: what it says is checked before memory is taken or a file opened.
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

#: Most bytes of a piece, and so of the buffer of who reads one.
MAX_PIECE_BYTES = 64 * 2**20

#: Most bytes of a manifest: about 400,000 pieces.
MAX_MANIFEST_BYTES = 64 * 2**20

#: What to do about a checkpoint that is damaged.
ANOTHER = "take another checkpoint; sbp-checkpoint verify FOLDER says which are whole"
_FILE = re.compile(r"rank-\d{5,9}\.safetensors")
_CHECKSUM = re.compile("[0-9a-f]{32}")
_LAST_LINE = re.compile(rb',\n"xxh3_128": "([0-9a-f]{32})"\}\n')


class DamagedError(ConfigError):
    """A checkpoint that is not what was written: another one may be whole."""


def _refuse(what: str, accepted: str) -> None:
    raise ConfigError(what, accepted=accepted)


_damaged = partial(DamagedError, todo=ANOTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPiece:
    """A slice of a tensor, in one run of bytes of a file.

    Args:
        file: Its name in the folder of the checkpoint.
        offset: Of its first byte in the file.
        bounds: Where it is in the tensor: (start, stop) of each dim.
        xxh3_128: Of its bytes: rows one after the other, little-endian.
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
    """A tensor in pieces that make it up, each element once.

    Args:
        shape, dtype: Of the whole.
        pieces: Of at most 64 MiB each, wherever they lie.
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
        """Return the bytes of one of the pieces."""
        return itemsize(self.dtype) * prod(stop - start for start, stop in piece.bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file: its header, and after it pieces without a gap.

    Args:
        size_bytes: Of the whole file.
        header_bytes: Of what is before the first piece.
        xxh3_128: Of the header.
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
        step: Updates done, >= 0.
        seed: Of random numbers in the step.
        cursor: Where the data go on, as the order of the data writes it.
        trainer: What the trainer keeps over steps, as it writes it.
        settings: Of the update and the schedule, by key: what a run that goes on should share.
        graph_hash: Of the captured step.
        config_hash: Of the settings that the run was started with, but for those of what it prints.
        versions: Of Python and packages, by name.
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
    """All of a checkpoint but the bytes of its tensors.

    Args:
        metadata: Where the run was.
        tensors: By the names of `Session.state_dict`.
        files: By name.
    """

    metadata: Metadata
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size_bytes for file in self.files.values())


#: A manifest, and what each process says of its own file, as JSON.
MANIFEST = Document(
    kind=CheckpointManifest, format="sbp-checkpoint", version=1, todo=ANOTHER, error=DamagedError
)


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """Return the whole file of a manifest, with its checksum."""
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
    """Read what `manifest_bytes` made.

    Args:
        data: Of the file.
        where: Its name, for messages.
        is_whole: Whether it is of a checkpoint, and not of the file of one process only.

    Raises:
        DamagedError: it was changed, is of another version, or says what cannot be.
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
    """Check that pieces make up the tensors, and the files after their headers.

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
