"""Tensors as a checkpoint that `torch.distributed.checkpoint.load` reads, by PyTorch's own writer.

The writer is given tensors without values, and asks for a chunk of one when it is its turn. Each
chunk gets a file, as PyTorch keeps all that goes to a file until it is written: so writing takes
the memory of a chunk, of at most 64 MiB.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
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
from sbp_launch.checkpoint.cover import cut
from sbp_launch.checkpoint.formats.aside import fresh
from sbp_launch.checkpoint.formats.distributed_checkpoint import is_distributed_checkpoint
from sbp_launch.checkpoint.local import sync
from sbp_launch.checkpoint.tensors import PART_BYTES, Tensors


def write_distributed_checkpoint(folder: Path, tensors: Tensors) -> None:
    """Write tensors as one process would; a checkpoint that is there is replaced.

    Args:
        folder: Is made if it is not there. It is written aside, and then renamed.
        tensors: Each part is asked for once.

    Raises:
        ConfigError: the folder has something else in it.
        RunError: it cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()) and not is_distributed_checkpoint(folder):
        raise ConfigError(
            f"{folder} has other files than those of torch.distributed.checkpoint",
            accepted="a folder that is new, empty, or holds such a checkpoint",
            todo="name another folder",
        )
    aside = fresh(folder)
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
    """Return the error of what has kept PyTorch from writing; ours as it is."""
    if isinstance(cause, SbpError):
        return cause
    reason = getattr(cause, "strerror", None) or cause
    return RunError(
        f"{folder} cannot be written: {reason}", todo="make room, or name another place"
    )


class _Planner(DefaultSavePlanner):
    """Hands over the values of a chunk when it is to be written."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def create_local_plan(self) -> SavePlan:
        """Cut what PyTorch would write as one into chunks."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in _chunks(item)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the values of a chunk."""
        data = write_item.tensor_data
        assert data is not None, "there are tensors only"
        chunk = zip(data.chunk.offsets, data.chunk.sizes, strict=True)
        return self._tensors.part(
            write_item.index.fqn, [(start, start + size) for start, size in chunk]
        )


def _chunks(item: WriteItem) -> Iterator[WriteItem]:
    """Yield the chunks of a tensor, each one run of its bytes."""
    data = item.tensor_data
    assert data is not None, "there are tensors only"
    for bounds in cut(data.size, data.properties.dtype.itemsize, PART_BYTES):
        offsets = torch.Size(start for start, _ in bounds)
        sizes = torch.Size(stop - start for start, stop in bounds)
        yield replace(
            item,
            index=replace(item.index, offset=offsets),
            type=WriteItemType.SHARD,
            tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes)),
        )
