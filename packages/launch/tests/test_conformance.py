import csv
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from sbp_core.plugins.hooks import EmptyConfig
from sbp_core.plugins.kinds import ClusterFactory, MetricSinkFactory, OptimizerFactory
from sbp_core.testing.cluster import ClusterConformance
from sbp_core.testing.logger import MetricSinkConformance, Records
from sbp_core.testing.optimizer import OptimizerConformance
from sbp_launch.clusters import LocalConfig, build_local
from sbp_launch.metrics import CsvConfig, JsonlConfig, build_csv, build_jsonl, build_none
from sbp_launch.optimizers import AdamWConfig, SgdConfig, build_adamw, build_sgd


class TestLocalCluster(ClusterConformance):
    dtypes = ("float32", "float64")

    def make_factory(self) -> ClusterFactory:
        return build_local(LocalConfig())


class TestJsonl(MetricSinkConformance):
    def make_factory(self) -> MetricSinkFactory:
        return build_jsonl(JsonlConfig())

    def read(self, run_folder: Path) -> Records:
        lines = (run_folder / "metrics.jsonl").read_text("utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return [
            (record.pop("step"), {name: float(value) for name, value in record.items()})
            for record in records
        ]


class TestCsv(MetricSinkConformance):
    def make_factory(self) -> MetricSinkFactory:
        return build_csv(CsvConfig())

    def read(self, run_folder: Path) -> Records:
        with (run_folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
            return list(by_step(list(csv.DictReader(file))))


def by_step(rows: list[dict[str, str]]) -> Iterator[tuple[int, dict[str, float]]]:
    for step, group in groupby(rows, key=lambda row: int(row["step"])):
        yield step, {row["metric"]: float(row["value"]) for row in group}


class TestNone(MetricSinkConformance):
    keeps = False

    def make_factory(self) -> MetricSinkFactory:
        return build_none(EmptyConfig())

    def read(self, run_folder: Path) -> Records:
        return []


class TestAdamW(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return build_adamw(AdamWConfig())


class TestSgd(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return build_sgd(SgdConfig())


class TestPlainSgd(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return build_sgd(SgdConfig(momentum=0.0))
