"""Metric sinks that write the metrics of a run as JSON lines or CSV, and one that drops them."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.plugins import EmptyConfig, MetricSinkFactory
from sbp_core.serialize import open_file
from sbp_launch.checkpoint.durable_files import writing_aside


def _check_file(file: str, key: str = "file") -> None:
    if not file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise ConfigError(
            f"{key}={file!r} is not inside the run folder", accepted="a relative path"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlConfig:
    """Settings of the sink `jsonl`: `file` is relative to the run folder."""

    file: str = "metrics.jsonl"

    def __post_init__(self) -> None:
        _check_file(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvConfig:
    """Settings of the sink `csv`: `file` is relative to the run folder."""

    file: str = "metrics.csv"

    def __post_init__(self) -> None:
        _check_file(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorboardConfig:
    """Settings of the sink `tensorboard`, relative to the run folder.

    Args:
        folder: Folder of the event files.
        jsonl: File of the same metrics as JSON lines; None for none.
    """

    folder: str = "tensorboard"
    jsonl: str | None = "metrics.jsonl"

    def __post_init__(self) -> None:
        _check_file(self.folder, "folder")
        if self.jsonl is not None:
            _check_file(self.jsonl, "jsonl")

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Check, before anything is planned, that TensorBoard is installed.

        Raises:
            ConfigError: it is not installed.
        """
        if find_spec("tensorboard") is None:
            raise ConfigError(
                "logger=tensorboard needs the package tensorboard, which is not installed",
                accepted="logger=jsonl, logger=csv, logger=none",
                todo="pip install 'sbp-launch[tensorboard]'",
            )


def _earlier_lines(path: Path, resumed_step: int, step_of: Callable[[str], int]) -> str:
    """Return the lines of an earlier part of a run, up to a step; "" if there are none.

    Args:
        path: Path of the file.
        resumed_step: The last step whose lines are kept.
        step_of: Returns the step of a line; raises `ValueError` for an invalid line.
    """
    kept: list[str] = []
    if resumed_step and path.exists():
        with open_file(path) as file:
            text = file.read().decode(errors="replace")
        for line in text.splitlines(keepends=True):
            try:
                # A killed run may leave an incomplete line.
                if line.endswith("\n") and step_of(line) <= resumed_step:
                    kept.append(line)
            except (ValueError, LookupError, TypeError):
                continue
    return "".join(kept)


class _FileSink:
    """A file whose lines of earlier steps are kept when a run is resumed."""

    def __init__(
        self, path: Path, resumed_step: int, head: str, step_of: Callable[[str], int]
    ) -> None:
        kept = _earlier_lines(path, resumed_step, step_of)
        with writing_aside(path) as file:
            file.write((head + kept).encode())
        self._file = path.open("a", encoding="utf-8", newline="")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonlSink(_FileSink):
    """Write one JSON object a line: `{"step": 1, "loss": 5.5}`.

    Every line is flushed, so a run that is killed keeps the lines that it logged. JSON has no
    infinities and no NaN: they are written as the strings `"inf"`, `"-inf"` and `"nan"`.

    Args:
        path: Path of the file.
        resumed_step: See `sbp_core.plugins.MetricSinkFactory`.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        super().__init__(path, resumed_step, "", lambda line: int(json.loads(line)["step"]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        record: dict[str, int | float | str] = {"step": step}
        for name, value in metrics.items():
            record[name] = value if math.isfinite(value) else str(float(value))
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class CsvSink(_FileSink):
    """Write a line `step,metric,value` for each metric, so that steps may have different metrics.

    Args:
        path: Path of the file.
        resumed_step: See `sbp_core.plugins.MetricSinkFactory`.
    """

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        head = "step,metric,value\n"
        super().__init__(path, resumed_step, head, lambda line: int(line.partition(",")[0]))
        self._writer = csv.writer(self._file, lineterminator="\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        self._writer.writerows((step, name, repr(value)) for name, value in metrics.items())
        self._file.flush()


class NoSink:
    """A sink that ignores all metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Ignore the metrics of one step."""

    def close(self) -> None:
        """Do nothing."""


def build_jsonl(config: JsonlConfig) -> MetricSinkFactory:
    """Return a function from a run folder to its `JsonlSink`."""
    return lambda run_folder, *, resumed_step=0: JsonlSink(run_folder / config.file, resumed_step)


def build_csv(config: CsvConfig) -> MetricSinkFactory:
    """Return a function from a run folder to its `CsvSink`."""
    return lambda run_folder, *, resumed_step=0: CsvSink(run_folder / config.file, resumed_step)


def build_none(config: EmptyConfig) -> MetricSinkFactory:
    """Return a function that makes a `NoSink`."""
    return lambda run_folder, *, resumed_step=0: NoSink()
