"""The metric sink `tensorboard`: event files for TensorBoard, in addition to JSON lines.

To view them, run `tensorboard --logdir runs`.
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
        folder: Folder of the event files. A run has one file: when it is resumed, the metrics of
            earlier steps are copied into a new file.
        resumed_step: See `sbp_core.plugins.MetricSinkFactory`.
        lines: A sink that gets the same metrics; None for none.
    """

    def __init__(self, folder: Path, resumed_step: int, lines: MetricSink | None) -> None:
        self._lines = lines
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        self._writer = cast(Any, SummaryWriter(str(folder)))  # partly untyped in PyTorch
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
    """Return a function from a run folder to its `TensorboardSink`."""

    def make(run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
        lines = JsonlSink(run_folder / config.jsonl, resumed_step) if config.jsonl else None
        return TensorboardSink(run_folder / config.folder, resumed_step, lines)

    return make
