"""Planners plan a stored step of a GPT and an MLP; nothing is run, so that no torch is needed."""

from __future__ import annotations

from importlib.resources import files

import plan_requests
import pytest
import yaml

from sbp_core.graph import LogicalGraph
from sbp_core.planning import Planner
from sbp_core.plugins import merge_settings
from sbp_core.testing.planner import PlannerConformance
from sbp_planner.configs import ManualConfig, OsdpConfig
from sbp_planner.manual import ManualPlanner
from sbp_planner.osdp import OsdpPlanner


class GptSuite(PlannerConformance):
    micro_batches = (2,)

    def make_graph(self, num_micro_batches: int) -> LogicalGraph:
        assert num_micro_batches == 2, "as the step was stored"
        return plan_requests.gpt_step()


class TestDataTensor(GptSuite):
    meshes = (((2, 2), ("data", "tensor")),)

    def make_planner(self) -> Planner:
        text = files("sbp_planner.conf").joinpath("planner", "manual", "data_tensor.yaml")
        option = yaml.safe_load(text.read_text("utf-8"))
        assert option.pop("name") == "manual"
        return ManualPlanner(merge_settings(ManualConfig, option))


class TestOsdp(PlannerConformance):
    meshes = (((1,), ("data",)), ((3,), ("data",)))

    def make_planner(self) -> Planner:
        return OsdpPlanner(OsdpConfig())


@pytest.mark.slow
class TestOsdpOfAGpt(TestOsdp, GptSuite):
    meshes = (((3,), ("data",)),)
