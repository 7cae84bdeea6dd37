"""From a program to a plan, without a run around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_aten import PassOptions
from sbp_core import Placement
from sbp_core.cluster import Cluster
from sbp_core.compile import check_strategy
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.memory import MemoryReport, memory_bound
from sbp_core.plugins import discover
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning.flow import (
    Planned,
    PlanSettings,
    capture_training,
    check_fits,
    compiled,
)

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
    model = nn.Linear(64, 65536)
    settings = PlanSettings(
        mesh=Placement.grid((2,), ("data",)), cluster=discover().make("cluster", "local")(2)
    )
    optimizer = torch.optim.SGD(model.parameters())
    captured = capture_training(model, many_classes, torch.ones(4, 64), optimizer, settings)

    def planned(graph: LogicalGraph) -> Strategy:
        return infer_strategy(settings.request(graph), planner="test", pins=pins)

    graph, strategy = captured.planned(planned)

    assert (SOFTMAX in {node.op for node in graph.nodes}) == is_one_operator
    compiled(graph, strategy, settings)
    assert captured.planned(lambda graph: read_again(strategy, graph)) == (graph, strategy)


def read_again(strategy: Strategy, graph: LogicalGraph) -> Strategy:
    check_strategy(graph, strategy)
    return strategy


@pytest.fixture
def on_two_ranks() -> tuple[Planned, Callable[[int], Cluster]]:
    """A plan, and clusters whose ranks have some bytes of memory."""
    model, plugins = nn.Linear(3, 4), discover()

    def cluster_of(memory_bytes: int) -> Cluster:
        cluster: Cluster = plugins.make("cluster", "local", {"memory_bytes": memory_bytes})(2)
        return cluster

    settings = PlanSettings(mesh=Placement.grid((2,), ("data",)), cluster=cluster_of(10**9))
    optimizer = torch.optim.SGD(model.parameters())
    graph = capture_training(model, many_classes, torch.ones(4, 3), optimizer, settings).graph
    strategy = infer_strategy(settings.request(graph), planner="test", pins={"*": "B"})
    return compiled(graph, strategy, settings), cluster_of


@pytest.mark.parametrize(("missing", "is_predicted"), [(0, False), (1, True)])
def test_exact_memory_is_predicted_only_where_a_bound_does_not_do(
    on_two_ranks: tuple[Planned, Callable[[int], Cluster]], missing: int, is_predicted: bool
) -> None:
    planned, cluster_of = on_two_ranks
    bound = memory_bound(planned.plan, planned.graph)

    check_fits(planned, cluster_of(bound - missing))

    assert ("memory" in vars(planned)) == is_predicted
    assert isinstance(planned.memory, MemoryReport)
    assert planned.memory.peak < bound


def test_the_limit_is_compared_with_the_exact_memory(
    on_two_ranks: tuple[Planned, Callable[[int], Cluster]],
) -> None:
    planned, cluster_of = on_two_ranks
    assert isinstance(planned.memory, MemoryReport)

    check_fits(planned, cluster_of(planned.memory.peak))
    with pytest.raises(ConfigError, match="would need"):
        check_fits(planned, cluster_of(planned.memory.peak - 1))


@pytest.mark.parametrize(
    ("axis", "asked", "expected"),
    [("data", None, 1), ("pipe", None, 2), ("pipe", False, 1), ("data", True, 2)],
)
def test_backward_of_convolutions_is_in_two_parts_where_there_may_be_stages(
    axis: str, asked: bool | None, expected: int
) -> None:
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 1, 1))
    settings = PlanSettings(
        mesh=Placement.grid((2,), (axis,)),
        cluster=discover().make("cluster", "local")(2),
        compile=CompileConfig(passes=PassOptions(split_backward=asked)),
    )
    optimizer = torch.optim.SGD(model.parameters())

    found = capture_training(
        model, lambda model, batch: model(batch).square().mean(), torch.ones(4, 1, 3), optimizer,
        settings,
    )  # fmt: skip

    of_second = [node for node in found.graph.nodes if node.name.startswith("1.grad.convolution")]
    assert len(of_second) == expected
