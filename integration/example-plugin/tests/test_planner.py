import pytest
import torch

from sbp_aten import prepare_step
from sbp_core import B, Cluster, Device, Link, NdSbp, Placement, PlanRequest, S
from sbp_core.errors import SbpError
from sbp_core.graph import InputKind
from sbp_example_plugin.model import Bigram
from sbp_example_plugin.model import build as build_model
from sbp_example_plugin.planner import build as build_planner
from sbp_example_plugin.plugin import ModelConfig, PlannerConfig
from sbp_torch import capture

MESH = Placement([[0, 1], [2, 3]], axes=("data", "tensor"))
CLUSTER = Cluster(
    name="test",
    num_devices=4,
    devices_per_node=4,
    device=Device(
        memory_bytes=1 << 30,
        flop_per_s={"float32": 1e10, "float64": 5e9},
        memory_bytes_per_s=1e10,
    ),
    intra_node=Link(latency_s=1e-5, bytes_per_s=1e9),
)


def make_request() -> PlanRequest:
    model = build_model(ModelConfig(vocabulary=6, context=4, hidden=8))
    tokens = torch.zeros(4, 4, dtype=torch.int64)
    graph = capture(
        model,
        Bigram.loss,
        {"tokens": tokens, "targets": tokens},
        torch.optim.AdamW(model.parameters(), foreach=False),
    )
    return PlanRequest(graph=prepare_step(graph), mesh=MESH, cluster=CLUSTER)


def test_the_batch_is_split_on_the_first_axis_and_every_state_is_whole() -> None:
    request = make_request()

    strategy = build_planner(PlannerConfig()).plan(request)

    for entry in request.graph.inputs:
        if entry.kind is InputKind.BATCH:
            assert strategy.storage[entry.name].sbp == NdSbp(S(0), B)
        elif entry.kind.is_state and request.graph.is_tensor(entry.name):
            assert strategy.storage[entry.name].sbp == NdSbp(B, B)
    assert strategy.planner == "example"


def test_the_axis_can_be_chosen() -> None:
    strategy = build_planner(PlannerConfig(axis="tensor")).plan(make_request())

    assert strategy.storage["tokens"].sbp == NdSbp(B, S(0))


def test_an_axis_that_the_mesh_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(SbpError) as caught:
        build_planner(PlannerConfig(axis="dta")).plan(make_request())

    assert caught.value.accepted == "data, tensor"
