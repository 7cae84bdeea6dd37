"""Every preset and `osdp` plan a small transformer that runs as on one device."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from sbp_aten.passes import prepare_step
from sbp_core.planning import Planner
from sbp_core.plugins import merge_settings
from sbp_planner.configs import ManualConfig, OsdpConfig
from sbp_planner.manual import ManualPlanner
from sbp_planner.osdp import OsdpPlanner
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.testing.planner import PlannerRunConformance
from sbp_torch.testing.programs import OneDeviceStep


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        batch, time, hidden = x.shape
        parts = self.qkv(x).view(batch, time, 4, 6).transpose(1, 2).chunk(3, dim=-1)
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, time, hidden))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(8), Attention()
        self.norm2, self.mlp = nn.LayerNorm(8), Mlp()

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Modules bear the names that the presets pin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 11, bias=False)

    def loss(self, batch: Mapping[str, Any]) -> Any:
        x = self.embed(batch["tokens"])
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), batch["targets"].flatten())


def tokens(batch_size: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(0, 11, (batch_size, 4), generator=generator)
        for name in ("tokens", "targets")
    }


@cache
def transformer_step(num_micro_batches: int) -> OneDeviceStep:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Transformer().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    graph = capture(model, lambda model, batch: model.loss(batch), tokens(4, 0), optimizer)
    return OneDeviceStep(
        graph=prepare_step(graph, num_micro_batches),
        states=initial_states(model, optimizer),
        batches=tuple(tokens(4 * num_micro_batches, 1 + index) for index in range(2)),
        scalars={"lr": 1e-2},
    )


class TransformerSuite(PlannerRunConformance):
    def make_step(self, num_micro_batches: int) -> OneDeviceStep:
        return transformer_step(num_micro_batches)


class PresetSuite(TransformerSuite):
    preset = ""

    def make_planner(self) -> Planner:
        text = files("sbp_planner.conf").joinpath("planner", "manual", f"{self.preset}.yaml")
        option = yaml.safe_load(text.read_text("utf-8"))
        assert option.pop("name") == "manual"
        return ManualPlanner(merge_settings(ManualConfig, option))


@pytest.mark.slow
class TestDataParallel(PresetSuite):
    preset = "data_parallel"
    meshes = (((2,), ("data",)), ((2, 2), ("data", "tensor")))


class TestTensorParallel(PresetSuite):
    preset = "tensor_parallel"
    meshes = (((2,), ("tensor",)), ((2, 2), ("data", "tensor")))
    micro_batches = (1,)


class TestDataTensor(PresetSuite):
    preset = "data_tensor"
    meshes = (((2, 2), ("data", "tensor")),)


class TestZero(PresetSuite):
    preset = "zero"
    meshes = (((3,), ("data",)),)


class TestZero1(PresetSuite):
    preset = "zero1"
    meshes = (((2,), ("data",)),)


@pytest.mark.slow
class TestPipeline(PresetSuite):
    preset = "pipeline"
    meshes = (((2,), ("pipe",)), ((2, 2), ("pipe", "data")))
    micro_batches = (1, 3)


class TestCustom(PresetSuite):
    preset = "custom"
    meshes = (((2, 2), ("data", "tensor")),)
    micro_batches = (1,)


@pytest.mark.exhaustive
class TestOsdp(TransformerSuite):
    meshes = (((1,), ("data",)), ((3,), ("data",)))

    def make_planner(self) -> Planner:
        return OsdpPlanner(OsdpConfig())


@pytest.mark.slow
class TestOsdpUnderALimit(TransformerSuite):
    """Little enough memory that some parameters have to be sharded."""

    meshes = (((2,), ("data",)),)
    micro_batches = (1,)
    memory_bytes = 50_000.0

    def make_planner(self) -> Planner:
        return OsdpPlanner(OsdpConfig(memory_bytes=self.memory_bytes))

    def test_some_parameters_are_sharded_and_some_are_not(self) -> None:
        modes = self.plan(self.meshes[0], 1).report["osdp"]["modes"]

        assert set(modes.values()) == {"DP", "ZDP"}
