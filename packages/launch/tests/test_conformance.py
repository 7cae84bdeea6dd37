import csv
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from sbp_core.plugins import Callback
from sbp_core.plugins.hooks import EmptyConfig
from sbp_core.plugins.kinds import ClusterFactory, MetricSinkFactory
from sbp_core.testing.callback import CallbackConformance
from sbp_core.testing.cluster_suite import ClusterConformance
from sbp_core.testing.logger import MetricSinkConformance, Records
from sbp_launch import optimizers
from sbp_launch.clusters import nvidia
from sbp_launch.clusters.local import LocalConfig, build_local
from sbp_launch.metrics.files import (
    CsvConfig,
    JsonlConfig,
    TensorboardConfig,
    build_csv,
    build_jsonl,
    build_none,
)
from sbp_launch.metrics.tensorboard import build as build_tensorboard
from sbp_launch.trainer.early_stop import EarlyStop, EarlyStopConfig
from sbp_torch.kinds import OptimizerFactory
from sbp_torch.testing.optimizer import OptimizerConformance


class TestLocalCluster(ClusterConformance):
    dtypes = ("float32", "float64")

    def make_factory(self) -> ClusterFactory:
        return build_local(LocalConfig())


class GpuConformance(ClusterConformance):
    """Of a profile of GPU nodes, within and between nodes."""

    sizes = (8, 16, 64)
    dtypes = ("float32", "float64", "bfloat16", "float16")


class TestV100(GpuConformance):
    def make_factory(self) -> ClusterFactory:
        return nvidia.build_v100(nvidia.GpuConfig())


class TestA100(GpuConformance):
    def make_factory(self) -> ClusterFactory:
        return nvidia.build_a100(nvidia.GpuConfig())


class TestH100(GpuConformance):
    def make_factory(self) -> ClusterFactory:
        return nvidia.build_h100(nvidia.GpuConfig(nodes_per_rack=2, rack_oversubscription=4.0))


class TestH200(GpuConformance):
    def make_factory(self) -> ClusterFactory:
        return nvidia.build_h200(nvidia.GpuConfig())


class TestB200(GpuConformance):
    def make_factory(self) -> ClusterFactory:
        return nvidia.build_b200(nvidia.GpuConfig())


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


class TestTensorboard(MetricSinkConformance):
    def make_factory(self) -> MetricSinkFactory:
        return build_tensorboard(TensorboardConfig(jsonl=None))

    def read(self, run_folder: Path) -> Records:
        read = EventAccumulator(str(run_folder / "tensorboard"), size_guidance={"tensors": 0})
        read.Reload()
        found: dict[int, dict[str, float]] = {}
        for tag in read.Tags()["tensors"]:
            for event in read.Tensors(tag):
                found.setdefault(event.step, {})[tag] = make_ndarray(event.tensor_proto).item()
        return sorted(found.items())


class TestNone(MetricSinkConformance):
    keeps = False

    def make_factory(self) -> MetricSinkFactory:
        return build_none(EmptyConfig())

    def read(self, run_folder: Path) -> Records:
        return []


class TestEarlyStop(CallbackConformance):
    def make_callback(self) -> Callback:
        return EarlyStop(EarlyStopConfig(patience=1))


class TestAdam(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_adam(optimizers.AdamConfig(amsgrad=True))


@pytest.mark.slow
class TestAdamW(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_adamw(optimizers.AdamWConfig())


@pytest.mark.slow
class TestAdagrad(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_adagrad(optimizers.AdagradConfig(initial_accumulator_value=0.1))


@pytest.mark.slow
class TestRmsprop(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_rmsprop(optimizers.RmspropConfig(momentum=0.9, centered=True))


@pytest.mark.slow
class TestLion(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_lion(optimizers.LionConfig())


@pytest.mark.slow
class TestLamb(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_lamb(optimizers.LambConfig())


@pytest.mark.slow
class TestRowWiseAdagrad(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_row_wise_adagrad(optimizers.RowWiseAdagradConfig())


@pytest.mark.slow
class TestLars(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_lars(optimizers.LarsConfig())


@pytest.mark.slow
class TestAdafactor(OptimizerConformance):
    eager_tolerance = 1e-12

    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_adafactor(optimizers.AdafactorConfig())


@pytest.mark.slow
class TestMuon(OptimizerConformance):
    #: In bfloat16 inside, where another order of a sum is seen.
    tolerance = 1e-3

    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_muon(optimizers.MuonConfig())


@pytest.mark.slow
class TestSgd(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_sgd(optimizers.SgdConfig())


class TestPlainSgd(OptimizerConformance):
    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_sgd(optimizers.SgdConfig(momentum=0.0))


@pytest.mark.slow
class TestDampenedSgd(OptimizerConformance):
    eager_tolerance = 1e-12

    def make_factory(self) -> OptimizerFactory:
        return optimizers.build_sgd(optimizers.SgdConfig(dampening=0.3))
