"""Hugging Face's layout: `model.safetensors`, or shards that an index names. Without torch.

config.json                         not read and not written
model.safetensors.index.json        {"metadata": {"total_size": ...}, "weight_map": {...}}
model-00001-of-00002.safetensors
model-00002-of-00002.safetensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sbp_core.errors import ConfigError, nearest
from sbp_core.serialize import load, parse, read_text
from sbp_launch.checkpoint.formats.index import StoredTensor, TensorIndex, inner_path
from sbp_launch.checkpoint.formats.safetensors_file import MOST_HEADER_BYTES, read_safetensors

#: The one file, the index of several, and the name of a shard by its number and their count.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"

_TODO = "get the files again, all of one revision"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def is_hugging_face(folder: Path) -> bool:
    """Return whether a folder has weights in this layout."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def read_hugging_face(folder: Path) -> TensorIndex:
    """Return where the tensors of a folder lie.

    Raises:
        ConfigError: a file is missing or damaged, or the index and the shards differ.
    """
    index = folder / INDEX
    if not index.is_file():
        found = read_safetensors(inner_path(folder, SINGLE, folder))
        return replace(found, path=folder, folder=folder)
    inner_path(folder, INDEX, folder)
    text = read_text(index, most_bytes=MOST_HEADER_BYTES, error=ConfigError, todo=_TODO)
    value = parse(text, where=str(index), error=ConfigError, todo=_TODO)
    weight_map = load(
        value, _Index, root="the index", where=str(index), error=ConfigError, todo=_TODO
    ).weight_map
    tensors: dict[str, StoredTensor] = {}
    notes: dict[str, str] = {}
    for file in sorted(set(weight_map.values())):
        shard = read_safetensors(inner_path(folder, file, index))
        notes |= shard.notes
        for name, tensor in shard.tensors.items():
            if weight_map.get(name) != file:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise ConfigError(
                    f"{name!r} is in {file}, and {where} according to the index",
                    where=str(index),
                    todo=_TODO,
                )
            pieces = tuple(replace(piece, file=file) for piece in tensor.pieces)
            tensors[name] = replace(tensor, pieces=pieces)
    for name, file in weight_map.items():
        if name not in tensors:
            near = nearest(name, tensors)
            raise ConfigError(
                f"{name!r} is not in {file}, as the index says",
                where=str(index),
                todo=f"it has {near!r}; {_TODO}" if near else _TODO,
            )
    return TensorIndex(
        path=folder,
        folder=folder,
        tensors={name: tensors[name] for name in weight_map},
        notes=notes,
    ).checked()
