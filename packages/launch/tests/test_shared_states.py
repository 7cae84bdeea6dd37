"""The plan of an evaluation, whose states are where training has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plugins import discover
from sbp_launch.planning.flow import (
    PlanSettings,
    capture_forward,
    capture_training,
    compiled,
    evaluating,
)
from sbp_launch.planning.shared_states import plan_on_states


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


@pytest.mark.slow
def test_states_that_an_evaluation_does_not_read_stay_on_their_stage() -> None:
    # The count of batches of a batch norm is written in training, and not read otherwise.
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)))
    settings = PlanSettings(
        mesh=Placement.grid((2,), ("pipe",)), cluster=discover().make("cluster", "local")(2)
    )
    batch, optimizer = torch.ones(4, 8), torch.optim.SGD(model.parameters())
    graph = capture_training(model, mean_square, batch, optimizer, settings).graph
    train = compiled(graph, infer_strategy(settings.request(graph), planner="test"), settings)
    with evaluating(model):
        forward = capture_forward(model, mean_square, batch, settings, "evaluate")

    found = plan_on_states(train, forward, settings)

    assert train.strategy.storage["1.1.num_batches_tracked"].stage == 1
    shared = found.strategy.storage.keys() & train.strategy.storage.keys()
    assert "1.1.num_batches_tracked" in shared
    for name in shared:
        assert found.strategy.storage[name] == train.strategy.storage[name]
