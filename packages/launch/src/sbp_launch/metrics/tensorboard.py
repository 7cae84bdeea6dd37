"""The metric sink `tensorboard`: event files for TensorBoard, next to the JSON lines.

tensorboard --logdir runs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped] # has no types
    LegacyEventFileLoader,
)
from torch.utils.tensorboard import SummaryWriter

from sbp_core.plugins import MetricSink, MetricSinkFactory
from sbp_launch.metrics.files import JsonlSink, TensorboardConfig


class TensorboardSink:
    """Write each metric as a scalar of TensorBoard, in double precision.

    Args:
        folder: Of the event files. A run has one: where it goes on, what stays of the earlier
            one is copied into the new one.
        resumed_step: See `sbp_core.plugins.MetricSinkFactory`.
        lines: Takes the same metrics.
    """

    def __init__(self, folder: Path, resumed_step: int, lines: MetricSink | None) -> None:
        self._lines = lines
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._writer = cast(Any, SummaryWriter(str(folder)))  # PyTorch leaves it half untyped
        for file in earlier if resumed_step else ():
            for event in LegacyEventFileLoader(str(file)).Load():
                if event.summary.value and event.step <= resumed_step:
                    self._writer.file_writer.add_event(event, event.step, event.wall_time)
        self._writer.flush()
        for file in earlier:
            file.unlink()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        if self._lines is not None:
            self._lines.log(step, metrics)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, new_style=True, double_precision=True)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._lines is not None:
            self._lines.close()
        self._writer.close()


def build(config: TensorboardConfig) -> MetricSinkFactory:
    """Return a maker of `TensorboardSink`."""

    def make(run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
        lines = JsonlSink(run_folder / config.jsonl, resumed_step) if config.jsonl else None
        return TensorboardSink(run_folder / config.folder, resumed_step, lines)

    return make
