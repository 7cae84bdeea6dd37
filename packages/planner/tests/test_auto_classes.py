"""`auto` where classes may be split: softmaxes in parts make their other plans slower."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import prepare_step
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphVariant
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.planning.variants import splits_classes
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import cluster
from sbp_planner import auto
from sbp_planner.search_configs import AutoConfig
from sbp_torch.graph_capture import capture


@cache
def _captured() -> LogicalGraph:
    model = nn.Linear(32, 4096, bias=False)
    batch = {"x": torch.ones(256, 32), "y": torch.zeros(256, dtype=torch.long)}

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    return capture(model, loss, batch, torch.optim.AdamW(model.parameters(), fused=True))


@cache
def _graph(in_parts: bool) -> LogicalGraph:
    options = PassOptions() if in_parts else PassOptions(split_classes=None)
    return prepare_step(_captured(), options=options)


@dataclass(frozen=True)
class Family:
    """Two variants: softmaxes in parts, or whole."""

    variant: GraphVariant = field(default_factory=GraphVariant)
    micro_batches: tuple[int, ...] = (1,)
    may_recompute: bool = False
    may_slice: bool = False

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        return _graph(variant.splits_classes)


def _plan(bytes_per_s: float, family: Family | None) -> Strategy:
    request = PlanRequest(
        graph=_graph(True),
        mesh=Placement.grid((2,), ("data",)),
        cluster=cluster(num_devices=2, bytes_per_s=bytes_per_s, launch_s=1e-6),
        family=family,  # type: ignore[arg-type] # of the protocol, what is asked for here
    )
    return auto.AutoPlanner(AutoConfig(time_limit_s=600)).plan(request)


@pytest.mark.slow
def test_whole_softmaxes_are_looked_at_even_if_split_classes_were_faster_than_parts() -> None:
    in_parts, chosen = _plan(1e9, None), _plan(1e9, Family())

    assert splits_classes(in_parts)
    assert not splits_classes(chosen)
    assert chosen.variant == GraphVariant(splits_classes=False)
    assert chosen.report["predicted_step_s"] < in_parts.report["predicted_step_s"]
    assert "softmaxes whole is the fastest" in chosen.report["explanation"][0]


@pytest.mark.slow
def test_classes_stay_split_where_the_link_is_slow() -> None:
    chosen = _plan(1e7, Family())

    assert splits_classes(chosen)
    assert chosen.variant == GraphVariant(splits_classes=True)
