"""Tensors as a checkpoint that `torch.distributed.checkpoint.load` reads, by PyTorch's own writer.

The writer is given tensors without values, and asks for each when it is its turn. Each gets a file,
as PyTorch keeps all tensors of a file until it is written: so writing takes the memory of the
largest tensor.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from sbp_core.errors import ConfigError, RunError, SbpError
from sbp_launch.checkpoint.formats.distributed_checkpoint import is_distributed_checkpoint
from sbp_launch.checkpoint.local import sync
from sbp_launch.checkpoint.tensors import Tensors


def write_distributed_checkpoint(folder: Path, tensors: Tensors) -> None:
    """Write tensors as one process would; a checkpoint that is there is replaced.

    Args:
        folder: Is made if it is not there. It is written aside, and then renamed.
        tensors: Each is asked for once.

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
    aside = folder.with_name(f".{folder.name}.part")
    states = {name: tensors.like(name) for name in tensors}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
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
    """Hands over the values of a tensor when it is to be written."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Any:
        value: Tensor = self._tensors[write_item.index.fqn]
        return value.detach().contiguous()
