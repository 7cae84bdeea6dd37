"""The metric sinks: what a run leaves in its folder."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins.hooks import EmptyConfig
from sbp_launch.metrics import (
    CsvConfig,
    JsonlConfig,
    build_csv,
    build_jsonl,
    build_none,
)


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
