"""Where the metrics of a run go: JSON lines, CSV, or nowhere."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.plugins import EmptyConfig, MetricSink, MetricSinkFactory


def _check_file(file: str) -> None:
    if not file or Path(file).is_absolute() or ".." in Path(file).parts:
        raise ConfigError(f"file={file!r} is not inside the run folder", accepted="a relative path")


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


class JsonlSink:
    """Write one JSON object a line: `{"step": 1, "loss": 5.5}`.

    Every line is flushed, so a run that is killed keeps what it logged. JSON has no infinities and
    no NaN: they are written as the strings `"inf"`, `"-inf"` and `"nan"`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        record: dict[str, int | float | str] = {"step": step}
        for name, value in metrics.items():
            record[name] = value if math.isfinite(value) else str(float(value))
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CsvSink:
    """Write a line `step,metric,value` for each metric, so that metrics may come and go."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(("step", "metric", "value"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        self._writer.writerows((step, name, repr(value)) for name, value in metrics.items())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class NoSink:
    """Keep nothing."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forget the metrics of one step."""

    def close(self) -> None:
        """Close nothing."""


def build_jsonl(config: JsonlConfig) -> MetricSinkFactory:
    """Return a maker of `JsonlSink`."""

    def make(run_folder: Path) -> MetricSink:
        return JsonlSink(run_folder / config.file)

    return make


def build_csv(config: CsvConfig) -> MetricSinkFactory:
    """Return a maker of `CsvSink`."""

    def make(run_folder: Path) -> MetricSink:
        return CsvSink(run_folder / config.file)

    return make


def build_none(config: EmptyConfig) -> MetricSinkFactory:
    """Return a maker of `NoSink`."""

    def make(run_folder: Path) -> MetricSink:
        return NoSink()

    return make
