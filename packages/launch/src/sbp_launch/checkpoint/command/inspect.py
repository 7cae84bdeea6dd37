"""`sbp-checkpoint inspect`: describe the contents of a checkpoint, without reading tensors."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from sbp_core.serialize import dump
from sbp_core.units import format_bytes
from sbp_launch.checkpoint.formats.index import TensorIndex
from sbp_launch.checkpoint.manifest import CheckpointManifest, Metadata
from sbp_launch.checkpoint.names import model_names, owner_of
from sbp_launch.checkpoint.places import FORMAT, FoundTensors, look, manifest_index, manifest_of
from sbp_launch.checkpoint.places import read_index as index_of
from sbp_launch.console import make_console, say, show_table

#: Names of formats in sentences.
FORMATS = {
    "sbp": "a checkpoint",
    "safetensors": "one file of safetensors",
    "hf": "weights in Hugging Face's layout",
    "dcp": "a checkpoint of torch.distributed.checkpoint",
}

#: A component of a dotted name that is a number.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def inspect(options: Namespace) -> int:
    """Print a description of the tensors at a path. Return the exit code."""
    found = look(options.path)
    manifest = manifest_of(found) if found.format == FORMAT else None
    index = manifest_index(manifest, found) if manifest else index_of(found)
    if options.json:
        print_json(as_json(found, index, manifest))
        return 0
    console = make_console()
    _show_head(console, found, index, manifest)
    if options.all:
        rows = [
            (name, str(list(one.shape)), one.dtype, format_bytes(one.size_bytes),
             str(len(one.pieces)))
            for name, one in index.tensors.items()
        ]  # fmt: skip
        show_table(
            console, ("tensor", "shape", "dtype", "size", "pieces"), rows, ("size", "pieces")
        )
    else:
        groups = list(_groups(index))
        keys = len({one.keys for one in groups if one.keys}) > 1  # else they are in the totals
        heads = ("tensor", "count", "shape", "dtype", "size", *(["optimizer states"] * keys))
        show_table(console, heads, (group.cells(keys) for group in groups), ("count", "size"))
    console.print()
    say(console, _totals(index))
    return 0


def print_json(value: Any) -> None:
    """Write JSON to standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def as_json(
    found: FoundTensors, index: TensorIndex, manifest: CheckpointManifest | None
) -> dict[str, Any]:
    """Return the output of `--json`."""
    return {
        "format": found.format,
        "path": found.place,
        "older": list(found.others),
        "size_bytes": index.size_bytes,
        "metadata": dump(manifest.metadata, Metadata) if manifest else dict(index.notes),
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "size_bytes": tensor.size_bytes,
                "optimizer_state_of": owner_of(name, index.tensors) or None,
                "files": sorted({piece.file for piece in tensor.pieces}),
            }
            for name, tensor in index.tensors.items()
        },
        "others": dict(index.others),
    }


def _show_head(
    console: Console, found: FoundTensors, index: TensorIndex, manifest: CheckpointManifest | None
) -> None:
    lines = [f"{found.place}: {FORMATS[found.format]}"]
    if manifest is not None:
        metadata = manifest.metadata
        lines.append(f"step {metadata.step:,}, seed {metadata.seed}")
        for key in ("cursor", "trainer"):
            value = getattr(metadata, key)
            if value is not None:
                lines.append(f"{key}: {_words(value)}")
        lines += [f"{key}: {_words(value)}" for key, value in metadata.settings.items()]
        if metadata.versions:
            lines.append(f"written by: {_words(metadata.versions)}")
    if index.notes:
        lines.append(f"notes: {_words(index.notes)}")
    if found.others:
        lines.append(f"older ones next to it: {', '.join(found.others)}")
    say(console, lines)
    console.print()


def _words(value: Any) -> str:
    """Return a JSON value on one line; empty parts are left out."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        parts = {key: part for key, part in value.items() if part not in (None, {}, [], "")}
        texts = {key: _words(part) for key, part in parts.items()}
        inside = {key: f"({texts[key]})" for key in texts if isinstance(parts[key], Mapping)}
        return ", ".join(f"{key} {text}" for key, text in {**texts, **inside}.items())
    return json.dumps(value)


@dataclass(slots=True)
class _Group:
    """Parameters of equal shape and dtype whose names differ only in numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    keys: tuple[str, ...]
    first: str
    count: int = 0
    size_bytes: int = 0

    def cells(self, with_keys: bool) -> tuple[str, ...]:
        """Return the cells of the group's row in the table."""
        name = self.name if self.count > 1 else self.first
        count, size = f"{self.count:,}", format_bytes(self.size_bytes)
        cells = (name, count, str(list(self.shape)), self.dtype, size)
        return (*cells, ", ".join(self.keys)) if with_keys else cells


def _groups(index: TensorIndex) -> Iterator[_Group]:
    """Yield parameters and buffers in groups, each with the keys of their optimizer states."""
    states: dict[str, list[str]] = defaultdict(list)
    for name in index.tensors:
        owner = owner_of(name, index.tensors)
        if owner:
            states[owner].append(name.removeprefix(f"{owner}."))
    own = set(model_names(index.tensors))
    groups: dict[tuple[Any, ...], _Group] = {}
    for name, tensor in index.tensors.items():
        if name not in own:
            continue
        pattern, keys = _NUMBER.sub("*", name), tuple(states[name])
        key = (pattern, tensor.shape, tensor.dtype, keys)
        group = groups.setdefault(key, _Group(pattern, tensor.shape, tensor.dtype, keys, name))
        group.count += 1
        group.size_bytes += tensor.size_bytes
    yield from groups.values()


def _totals(index: TensorIndex) -> Iterator[str]:
    """Yield lines with the total number and size of parameters, states and files."""
    kinds = {group.keys for group in _groups(index) if group.keys}
    own = model_names(index.tensors)
    own_bytes = sum(index.tensors[name].size_bytes for name in own)
    yield f"parameters and buffers: {len(own):,}, {format_bytes(own_bytes)}"
    if len(own) < len(index.tensors):
        rest = index.size_bytes - own_bytes
        number = len(index.tensors) - len(own)
        named = f" ({', '.join(*kinds)})" if len(kinds) == 1 else ""
        yield f"states of the optimizer{named}: {number:,}, {format_bytes(rest)}"
    yield f"files: {len(index.files):,}"
    for name, value in index.others.items():
        yield f"no tensor: {name} = {value}"
