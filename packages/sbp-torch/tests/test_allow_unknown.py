"""Operators that nobody describes: refused, run whole, or tried out, as the graph says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.errors import SignatureError
from sbp_core.graph.ir import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.passes import allow_unknown
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.signatures import OpCall, UnknownOperator, derive
from sbp_core.testing.graphs import cluster
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession

OP = "sbp_test_unknown.centre.default"


class Centred(nn.Module):
    """Takes the mean of each row from it, in an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        rows = torch.ops.sbp_test_unknown.centre(batch["x"])
        return (rows * self.weight).sum()


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An operator without a rule, and a folder of its own for what discovery keeps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with torch.library._scoped_library("sbp_test_unknown", "DEF") as library:
        library.define("centre(Tensor x) -> Tensor")
        library.impl("centre", lambda x: x - x.mean(1, keepdim=True), "CompositeExplicitAutograd")
        yield


BATCH = {"x": torch.arange(20.0, dtype=torch.float64).view(5, 4).square()}


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def graph_with(unknown: UnknownOperator) -> LogicalGraph:
    captured = capture(Centred().double(), loss_of, BATCH, None)
    return prepare_step(captured, extra=[partial(allow_unknown, unknown=unknown)])


def signatures_of(graph: LogicalGraph) -> list[str]:
    (node,) = (node for node in graph.nodes if node.op == OP)
    return [str(part) for part in derive(OpCall.of(graph, node), 2)]


@pytest.mark.usefixtures("operator")
def test_an_unknown_operator_is_refused_and_the_ways_out_are_named() -> None:
    with pytest.raises(SignatureError, match="nothing says how sbp_test_unknown") as caught:
        signatures_of(graph_with(UnknownOperator.REFUSE))

    assert "unknown_ops=discover" in caught.value.todo


@pytest.mark.usefixtures("operator")
def test_an_unknown_operator_may_run_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        graph = graph_with(UnknownOperator.WHOLE)

    assert signatures_of(graph) == ["B -> B"]
    assert f"no rule says how {OP} may be split: it runs whole" in caplog.text


@pytest.mark.usefixtures("operator")
def test_an_unknown_operator_may_be_tried_out_and_run_as_found() -> None:
    model = Centred().double()
    graph = graph_with(UnknownOperator.DISCOVER)
    mesh = Placement.grid((3,), ("ranks",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(num_devices=3))
    pins = {"batch": "S(0)", "activations": "S(0)"}

    strategy = infer_strategy(request, planner="test", pins=pins)
    session = ReferenceSession(
        compile_plan(graph, strategy), initial_states(model), ReferenceConfig()
    )
    result = session.step(dict(BATCH), {})

    (node,) = (node for node in graph.nodes if node.op == OP)
    found = {str(part): part.origin for part in derive(OpCall.of(graph, node), 3)}
    assert found["S(0) -> S(0)"] == found["P -> P"] == "discovered"
    assert "S(1) -> S(1)" not in found
    assert str(strategy.nodes[node.name].signature) == "(S(0)) -> (S(0))"
    torch.testing.assert_close(result.outputs["loss"], loss_of(model, BATCH).detach())
