"""The suites that sbp ships for plugin authors: subclass one for each kind that you supply."""

from collections.abc import Mapping

import torch

from sbp_core.planning import Planner
from sbp_core.plugins import Callback
from sbp_core.testing.callback import CallbackConformance
from sbp_example_plugin.callback import build as build_callback
from sbp_example_plugin.data import Counting
from sbp_example_plugin.data import build as build_data
from sbp_example_plugin.model import Bigram
from sbp_example_plugin.model import build as build_model
from sbp_example_plugin.planner import build as build_planner
from sbp_example_plugin.plugin import CallbackConfig, DataConfig, ModelConfig, PlannerConfig
from sbp_torch.testing.data import DatasetConformance
from sbp_torch.testing.model import ModelConformance
from sbp_torch.testing.planner import PlannerRunConformance


class TestPlanner(PlannerRunConformance):
    def make_planner(self) -> Planner:
        return build_planner(PlannerConfig())


class TestData(DatasetConformance):
    splits = ("train", "validation")

    def make_dataset(self) -> Counting:
        return build_data(DataConfig(vocabulary=6, context=4, num_samples=30))


class TestCallback(CallbackConformance):
    def make_callback(self) -> Callback:
        return build_callback(CallbackConfig(loss=2.4, decay=0.5))


class TestModel(ModelConformance):
    vocabulary = 6

    def make_model(self) -> Bigram:
        return build_model(ModelConfig(vocabulary=6, context=4, hidden=8))

    def make_batch(self, batch_size: int) -> Mapping[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        return {
            name: torch.randint(0, 6, (batch_size, 4), generator=generator)
            for name in ("tokens", "targets")
        }
