"""From a program to a plan, without a run around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_core import Placement
from sbp_core.plugins import discover
from sbp_launch.planning import PlanSettings, capture_training

SOFTMAX = "aten._log_softmax.default"


def many_classes(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch), torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(("num_ranks", "is_one_operator"), [(1, True), (2, False)])
def test_the_softmax_of_a_single_rank_stays_one_operator(
    num_ranks: int, is_one_operator: bool
) -> None:
    model = nn.Linear(3, 2048)
    optimizer = torch.optim.SGD(model.parameters())
    settings = PlanSettings(
        mesh=Placement.grid((num_ranks,), ("data",)),
        cluster=discover().make("cluster", "local")(num_ranks),
    )

    graph = capture_training(model, many_classes, torch.ones(4, 3), optimizer, settings)

    assert (SOFTMAX in {node.op for node in graph.nodes}) == is_one_operator
