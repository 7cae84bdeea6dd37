"""Write tensors in the formats of other libraries, one after the other in parts of up to 64 MiB.

Safetensors: one file, or the shards of Hugging Face's libraries. The header is written first,
because shapes and dtypes are known without values.

DCP: PyTorch's own writer writes a checkpoint for `torch.distributed.checkpoint.load`. It receives
tensors without values, and requests each chunk when it writes it. Each chunk gets its own file,
because PyTorch keeps all data of a file in memory until the file is written. So writing takes the
memory of one chunk.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from sbp_core.errors import ConfigError, RunError, SbpError
from sbp_core.units import format_bytes
from sbp_launch.checkpoint.cover import split_into_blocks
from sbp_launch.checkpoint.durable_files import fresh_path, sync, writing_aside
from sbp_launch.checkpoint.formats.distributed_checkpoint import is_distributed_checkpoint
from sbp_launch.checkpoint.formats.safetensors_file import (
    CODES,
    INDEX,
    MOST_HEADER_BYTES,
    SHARD,
    SINGLE,
)
from sbp_launch.checkpoint.tensors import PART_BYTES, LazyTensors, bytes_of, dtype_name, size_bytes

#: Metadata of files: tensors of PyTorch. `transformers` loads no file without it.
_NOTES = {"format": "pt"}


def write_safetensors(path: Path, tensors: LazyTensors, names: Iterable[str] | None = None) -> None:
    """Write tensors into one file; when it is complete, it replaces an existing file.

    Args:
        path: Path of the file.
        tensors: The tensors; each is read once.
        names: Names of the tensors to write; None for all.

    Raises:
        ConfigError: a tensor has a dtype that the format does not have.
        RunError: it cannot be written.
    """
    metas = {name: tensors.like(name) for name in (tensors if names is None else names)}
    # Large elements first, so that each tensor starts at a multiple of its element size.
    order = sorted(metas, key=lambda name: (-metas[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": _NOTES}
    end = 0
    for name in order:
        if (dtype := dtype_name(metas[name])) not in CODES:
            what = f"{name!r} is {dtype}, which safetensors does not have"
            raise ConfigError(what, accepted=", ".join(CODES))
        begin, end = end, end + size_bytes(metas[name])
        header[name] = {
            "dtype": CODES[dtype],
            "shape": list(metas[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        raise ConfigError(
            f"{len(metas)} tensors need a header of {format_bytes(len(text))}",
            accepted=f"at most {format_bytes(MOST_HEADER_BYTES)}",
            todo="write several files: --to hf --max-shard-size SIZE",
        )
    with writing_aside(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            for part in tensors.parts(name):
                file.write(bytes_of(part))


def write_sharded(folder: Path, tensors: LazyTensors, max_shard_bytes: int) -> list[str]:
    """Write tensors in Hugging Face's layout: `model.safetensors`, or shards and an index.

    Tensors keep their order, and shards are filled one after the other; a tensor that is larger
    than a shard gets its own shard. Other files in the folder stay, such as `config.json`; existing
    weights are replaced.

    Args:
        folder: The folder; created if it does not exist.
        tensors: The tensors; each is read once.
        max_shard_bytes: Largest number of tensor bytes in a shard.

    Returns:
        The names of the files.

    Raises:
        ConfigError: a tensor has a dtype that the format does not have.
        RunError: they cannot be written.
    """
    sizes = {name: size_bytes(tensors.like(name)) for name in tensors}
    shards: list[list[str]] = [[]]  # one shard without tensors if there are none
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [SHARD.format(number, len(shards)) for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    aside = fresh_path(folder / "weights")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        for file, names in zip(files, shards, strict=True):
            write_safetensors(aside / file, tensors, names)
        if len(shards) > 1:
            homes = {
                name: file for file, names in zip(files, shards, strict=True) for name in names
            }
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": homes}
            with writing_aside(aside / INDEX) as opened:
                opened.write(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
            files.append(INDEX)
        # The single file or the index marks the weights as complete: removed first, moved last.
        for name in (INDEX, SINGLE):
            (folder / name).unlink(missing_ok=True)
        for old in folder.iterdir():
            if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", old.name):
                old.unlink()
        sync(folder)
        for name in files:
            (aside / name).replace(folder / name)
            sync(folder)
    except OSError as error:
        raise RunError(
            f"{folder} cannot be written: {error.strerror or error}", todo="name another place"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return files


def write_distributed_checkpoint(folder: Path, tensors: LazyTensors) -> None:
    """Write tensors as a checkpoint of one process; an existing checkpoint is replaced.

    Args:
        folder: The folder; created if it does not exist. It is written aside, and then renamed.
        tensors: The tensors; each part is read once.

    Raises:
        ConfigError: the folder has something else in it.
        RunError: it cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()) and not is_distributed_checkpoint(folder):
        raise ConfigError(
            f"{folder} has files that are not of torch.distributed.checkpoint",
            accepted="a folder that is new, empty, or holds such a checkpoint",
            todo="name another folder",
        )
    aside = fresh_path(folder)
    states = {name: tensors.like(name) for name in tensors}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
            save(
                states,
                storage_writer=FileSystemWriter(aside, single_file_per_rank=False),
                planner=_Planner(tensors),
                no_dist=True,
            )
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
        sync(folder.parent)
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise _cannot_write(folder, cause) from error
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _cannot_write(folder: Path, cause: BaseException) -> BaseException:
    """Return the error to raise after PyTorch could not write; an error of ours is unchanged."""
    if isinstance(cause, SbpError):
        return cause
    reason = getattr(cause, "strerror", None) or cause
    return RunError(
        f"{folder} cannot be written: {reason}", todo="make room, or name another place"
    )


class _Planner(DefaultSavePlanner):
    """A save planner that provides the values of each chunk when the chunk is written."""

    def __init__(self, tensors: LazyTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        """Cut the tensors of PyTorch's plan into chunks, each a contiguous range of bytes."""
        plan, parts = super().create_local_plan(), []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None, "there are tensors only"
            for bounds in split_into_blocks(data.size, data.properties.dtype.itemsize, PART_BYTES):
                offsets = torch.Size(start for start, _ in bounds)
                sizes = torch.Size(stop - start for start, stop in bounds)
                chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
                index = replace(item.index, offset=offsets)
                of_chunk = replace(data, chunk=chunk)
                kind = WriteItemType.SHARD
                parts.append(replace(item, index=index, type=kind, tensor_data=of_chunk))
        self.plan = replace(plan, items=parts)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the values of a chunk."""
        data = write_item.tensor_data
        assert data is not None, "there are tensors only"
        chunk = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
        return self._tensors.part(
            write_item.index.fqn, [(start, start + size) for start, size in chunk]
        )
