"""Small checkpoints of two ranks, and what `sbp-checkpoint` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sbp_core.plugins import CheckpointStorage
from sbp_core.runtime import StatePiece
from sbp_launch.checkpoint import LocalStorage, Metadata, commit, write_part
from sbp_launch.checkpoint.command.app import main


def states(scale: float = 1.0) -> dict[str, Tensor]:
    """Return the states of a small run: two layers, a buffer, and what an optimizer keeps."""
    found = {f"network.{layer}.weight": torch.ones(4, 6) * scale * layer for layer in (1, 2)}
    found["network.positions"] = torch.arange(4)
    for name in list(found)[:2]:
        found[f"{name}.exp_avg"] = torch.zeros(4, 6)
        found[f"{name}.step"] = torch.tensor(3.0)
        found[f"{name}.ema"] = found[name] / 2
    return found


def write(
    folder: Path, step: int, values: dict[str, Tensor] | None = None, trainer: Any = None
) -> Path:
    """Write a checkpoint of two ranks into a run folder, and return its folder."""
    storage = LocalStorage(folder / "checkpoints")
    return Path(write_to(storage, step, values, trainer))


def write_to(
    storage: CheckpointStorage,
    step: int,
    values: dict[str, Tensor] | None = None,
    trainer: Any = None,
) -> str:
    """Write a checkpoint of two ranks into a storage, and return where it is."""
    staged = storage.stage(f"step-{step:08d}")
    metadata = Metadata(step=step, seed=7, settings={"lr": step / 1000}, trainer=trainer)
    for rank in (0, 1):
        pieces = []
        for name, value in (values or states()).items():
            rows = (2 * rank, 2 * rank + 2)
            if value.dim() == 2:
                pieces.append(piece(name, value, (rows, (0, value.shape[1])), value[slice(*rows)]))
            elif rank == 0:
                pieces.append(piece(name, value, tuple((0, n) for n in value.shape), value))
        write_part(staged, rank, metadata, pieces)
    commit(staged, [0, 1])
    return storage.place(f"step-{step:08d}")


def piece(name: str, whole: Tensor, bounds: Any, value: Tensor) -> StatePiece:
    dtype = str(whole.dtype).removeprefix("torch.")
    return StatePiece(name=name, shape=tuple(whole.shape), dtype=dtype, bounds=bounds, value=value)


def damage(checkpoint: Path) -> None:
    """Flip a bit of the last tensor of a rank."""
    path = checkpoint / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return exit code and what was printed, errors included."""
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Return the JSON that was printed."""
    main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)
