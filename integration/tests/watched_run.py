"""A plugin of tests: a GPT with tied weights and dropout, data that note what is loaded, a stop.

`installed` makes it known to `sbp-train`; `loaded` returns what the processes of a run have noted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import numpy.typing as npt

from sbp_core.plugins import (
    Callback,
    Factory,
    TrainerControl,
    TrainerState,
    discover,
    hookimpl,
)

SBP_API_VERSION = 2

#: Where a process notes what it loads, in the folder in which it runs.
NOTES = "loaded"

#: Folder of the options that name the model and the data.
OPTIONS = "options"

CONTEXT, VOCABULARY = 8, 32


def installed(folder: Path) -> str:
    """Write what pip would leave of this module, and its options for `--config-dir`.

    Returns:
        The PYTHONPATH that finds all of it.
    """
    info = folder / "watched_run-0.1.dist-info"
    texts = {
        info / "METADATA": "Metadata-Version: 2.1\nName: watched-run\nVersion: 0.1\n",
        info / "entry_points.txt": "[sbp]\nwatched-run = watched_run\n",
        folder / OPTIONS / "model" / "tied_gpt.yaml": "name: tied_gpt\ndropout: 0.0\n",
        folder / OPTIONS / "data" / "noted.yaml": "name: noted\nnum_samples: 40\n",
    }
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    here, before = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(folder), here, *([before] if before else [])])


def loaded(folder: Path) -> list[list[list[int]]]:
    """Return the numbers of the samples that each process has loaded: a list for each step."""
    return [
        [[int(number) for number in line.split()] for line in path.read_text("utf-8").splitlines()]
        for path in sorted((folder / NOTES).iterdir())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of the model."""

    dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Settings of the data."""

    num_samples: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StopConfig:
    """Settings of the callback that ends a run: behind which step."""

    step: int = 1


@hookimpl
def sbp_models() -> Mapping[str, Factory]:
    """Return the model."""
    return {"tied_gpt": Factory(build="watched_run:make_model", config=ModelConfig)}


@hookimpl
def sbp_datasets() -> Mapping[str, Factory]:
    """Return the data set."""
    return {"noted": Factory(build="watched_run:Noted", config=DataConfig)}


@hookimpl
def sbp_callbacks() -> Mapping[str, Factory]:
    """Return the callback."""
    return {"stop_behind": Factory(build="watched_run:StopBehind", config=StopConfig)}


def make_model(config: ModelConfig) -> Any:
    """Return a GPT whose head is its embedding, with dropout on what its blocks add."""
    from torch.nn import functional

    layers = {"num_layers": 2, "hidden": 16, "num_heads": 2}
    model: Any = discover().make(
        "model", "gpt", {**layers, "context": CONTEXT, "vocabulary": VOCABULARY}
    )
    model.head.weight = model.embed.tokens.weight

    def drop(module: Any, given: Any, found: Any) -> Any:
        return functional.dropout(found, config.dropout, module.training)

    if config.dropout:
        for block in model.blocks:
            for part in (block.attention, block.mlp):
                part.register_forward_hook(drop)
    return model


class Noted:
    """Sequences that count on in steps of their own; each load of the loader is noted."""

    vocabulary = VOCABULARY

    def __init__(self, config: DataConfig) -> None:
        self._size = config.num_samples

    def num_samples(self, split: str = "train") -> int:
        """Return how many there are."""
        return self._size

    def samples(self, numbers: npt.NDArray[np.int64], split: str = "train") -> Mapping[str, Any]:
        """Return some; see `Dataset`."""
        import torch

        # The thread that loads batches: what examples and fingerprints ask for trains nothing.
        if current_thread().name == "load train":
            path = Path(NOTES) / f"{os.getpid()}.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(" ".join(map(str, numbers.tolist())) + "\n")
        start = torch.from_numpy(numbers)[:, None]
        tokens = (start + (1 + start % 5) * torch.arange(CONTEXT + 1)) % VOCABULARY
        return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}

    def describe(self) -> str:
        """Return a line."""
        return f"{self._size} sequences"


class StopBehind(Callback):
    """Ends a run behind a step."""

    def __init__(self, config: StopConfig) -> None:
        self._step = config.step

    def on_step_end(
        self, state: TrainerState, metrics: Mapping[str, float]
    ) -> TrainerControl | None:
        """See a step that is done."""
        return TrainerControl(stop="as told") if state.step == self._step else None
