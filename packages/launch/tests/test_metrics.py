"""The metric sinks: what a run leaves in its folder."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sbp_core.errors import ConfigError, PluginError, RunError
from sbp_core.plugins import Factory, PluginEntry
from sbp_core.plugins.hooks import EmptyConfig
from sbp_launch.metrics import files as metrics
from sbp_launch.metrics.files import (
    CsvConfig,
    JsonlConfig,
    TensorboardConfig,
    build_csv,
    build_jsonl,
    build_none,
)
from sbp_launch.metrics.tensorboard import build as build_tensorboard
from sbp_launch.run.metrics import calling_sink


def test_each_step_is_one_json_object_and_is_there_at_once(tmp_path: Path) -> None:
    sink = build_jsonl(JsonlConfig())(tmp_path)

    sink.log(1, {"loss": 5.5})
    sink.log(2, {"loss": math.nan, "tokens_per_s": math.inf})

    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    sink.close()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 5.5},
        {"step": 2, "loss": "nan", "tokens_per_s": "inf"},
    ]


def test_csv_takes_metrics_that_come_and_go(tmp_path: Path) -> None:
    sink = build_csv(CsvConfig(file="deep/m.csv"))(tmp_path)

    sink.log(1, {"loss": 5.5})
    sink.log(2, {"held_out_loss": 4.25})
    sink.close()

    assert (tmp_path / "deep" / "m.csv").read_text(encoding="utf-8") == (
        "step,metric,value\n1,loss,5.5\n2,held_out_loss,4.25\n"
    )


def test_none_leaves_nothing(tmp_path: Path) -> None:
    sink = build_none(EmptyConfig())(tmp_path)

    sink.log(1, {"loss": 5.5})
    sink.close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["", "/metrics", "../metrics", "a/../../b"])
def test_metrics_stay_inside_the_run_folder(file: str) -> None:
    with pytest.raises(ConfigError, match="file="):
        JsonlConfig(file=file)
    with pytest.raises(ConfigError, match="file="):
        CsvConfig(file=file)


@pytest.mark.parametrize("settings", [{"folder": "/tmp/x"}, {"jsonl": "../x"}])
def test_files_of_tensorboard_stay_in_the_run_folder(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is not inside the run folder"):
        TensorboardConfig(**settings)


def test_without_tensorboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match="needs the package tensorboard") as caught:
        TensorboardConfig().check_combination({})

    assert caught.value.todo == "pip install 'sbp-launch[tensorboard]'"


def test_tensorboard_keeps_the_lines_beside(tmp_path: Path) -> None:
    sink = build_tensorboard(TensorboardConfig())(tmp_path)
    sink.log(1, {"loss": 0.5})
    sink.close()

    assert json.loads((tmp_path / "metrics.jsonl").read_text("utf-8")) == {"step": 1, "loss": 0.5}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_half_a_line_of_a_killed_run_is_dropped_when_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo', "utf-8")

    sink = build_jsonl(JsonlConfig())(tmp_path, resumed_step=2)
    sink.log(3, {"loss": 1.0})
    sink.close()

    steps = [json.loads(line)["step"] for line in file.read_text("utf-8").splitlines()]
    assert steps == [1, 3]


def test_half_a_number_of_a_killed_run_is_dropped_when_it_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.csv"
    file.write_text("step,metric,value\n1,loss,2.0\n2,loss,1.", "utf-8")

    sink = build_csv(CsvConfig())(tmp_path, resumed_step=2)
    sink.log(3, {"loss": 1.0})
    sink.close()

    assert file.read_text("utf-8") == "step,metric,value\n1,loss,2.0\n3,loss,1.0\n"


def test_events_of_a_run_that_goes_on_keep_their_time(tmp_path: Path) -> None:
    def events() -> list[tuple[int, float]]:
        read = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
        read.Reload()
        return [(event.step, event.wall_time) for event in read.Tensors("loss")]

    make = build_tensorboard(TensorboardConfig(jsonl=None))
    sink = make(tmp_path)
    sink.log(1, {"loss": 2.0})
    sink.close()
    before = events()

    sink = make(tmp_path, resumed_step=1)
    sink.log(2, {"loss": 1.0})
    sink.close()

    found = events()
    assert found[:1] == before
    assert [step for step, _ in found] == [1, 2]


class URLError(OSError):
    """An error of a library that derives its own from `OSError`, as urllib and requests do."""


@dataclass
class RunOfPlugin:
    folder: Path

    def entry(self, kind: str) -> PluginEntry:
        factory = Factory(build="mine.sink:build")
        return PluginEntry(
            kind=kind,
            name="mine",
            distribution="my-dist",
            version="1.2",
            api_version=2,
            factory=factory,
        )


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("the server is gone"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError("timed out"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        URLError("no route"),
        PermissionError(errno.EACCES, "Permission denied", "/elsewhere/metrics.db"),
        ValueError("a bug"),
    ],
)
def test_what_a_sink_raises_of_its_own_is_no_full_disk(tmp_path: Path, error: Exception) -> None:
    run: Any = RunOfPlugin(tmp_path)

    with pytest.raises(PluginError) as caught, calling_sink(run, "log"):
        raise error

    told = f"logger 'mine' of my-dist 1.2 raised {type(error).__name__}: {error}"
    assert caught.value.what == told


@pytest.mark.parametrize("file", ["", "metrics.jsonl"])
def test_a_full_disk_is_told_of_the_run_folder(tmp_path: Path, file: str) -> None:
    run: Any = RunOfPlugin(tmp_path)
    named = [str(tmp_path / file)] if file else []

    with (
        pytest.raises(RunError, match="cannot be written: No space left"),
        calling_sink(run, "log"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", *named)
