"""From a program to a plan, without a run around it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_core import Placement
from sbp_core.compile import check_strategy
from sbp_core.graph import LogicalGraph
from sbp_core.plugins import discover
from sbp_core.strategy import Strategy
from sbp_launch.planning import PlanSettings, capture_training, compiled

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

    found = capture_training(model, many_classes, torch.ones(4, 3), optimizer, settings)

    assert (SOFTMAX in {node.op for node in found.graph.nodes}) == is_one_operator
    assert (found.whole is None) == is_one_operator


@pytest.mark.parametrize(
    ("pins", "is_one_operator"),
    [
        ({"batch": "S(0)", "use:batch": "S(0)", "activations": "S(0)"}, True),
        ({"weight": "S(0)", "use:weight": "S(0)", "bias": "S(0)", "use:bias": "S(0)"}, False),
    ],
)
def test_softmaxes_are_in_parts_only_where_their_classes_are_split(
    pins: dict[str, str], is_one_operator: bool
) -> None:
    model, planners = nn.Linear(64, 65536), discover()
    settings = PlanSettings(
        mesh=Placement.grid((2,), ("data",)), cluster=planners.make("cluster", "local")(2)
    )
    planner = planners.make("planner", "manual", {"pins": pins})
    optimizer = torch.optim.SGD(model.parameters())
    captured = capture_training(model, many_classes, torch.ones(4, 64), optimizer, settings)

    graph, strategy = captured.planned(lambda graph: planner.plan(settings.request(graph)))

    assert (SOFTMAX in {node.op for node in graph.nodes}) == is_one_operator
    compiled(graph, strategy, settings)
    assert captured.planned(lambda graph: read_again(strategy, graph)) == (graph, strategy)


def read_again(strategy: Strategy, graph: LogicalGraph) -> Strategy:
    check_strategy(graph, strategy)
    return strategy
