"""One mesh axis of a strategy is decided anew, the others stay."""

from dataclasses import replace

from sbp_core.compile import check_strategy
from sbp_core.graph import InputKind
from sbp_core.infer import infer_axis, infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.sbp import NdSbp
from sbp_core.testing.graphs import cluster, mlp

GRAPH = mlp((8, 16, 16, 8), batch=32)
AXES = ("data", "tensor")
DATA = {"batch": {"data": "S(0)"}, "activations": {"data": "S(0)"}}
REPLICATED = {word: {"data": "B"} for word in ("parameters", "optimizer_states", "updates")}
TENSOR = {"layers.0.weight": {"tensor": "S(0)"}, "use:layers.0.weight": {"tensor": "S(0)"}}

REQUEST = PlanRequest(
    graph=GRAPH, mesh=Placement.grid((2, 2), AXES), cluster=cluster(), pins=TENSOR
)
BASE = infer_strategy(REQUEST, planner="test", pins=DATA | REPLICATED)


def test_under_the_same_pins_nothing_changes():
    found = infer_axis(REQUEST, BASE, axis="data", pins=DATA | REPLICATED)

    assert found == replace(BASE, report={})


def test_the_other_axis_stays_as_it_is_and_the_plan_is_legal():
    sharded = {word: {"data": "S(0)"} for word in ("parameters", "optimizer_states")}

    found = infer_axis(REQUEST, BASE, axis="data", pins=DATA | sharded)

    check_strategy(GRAPH, found)
    assert str(BASE.storage["layers.0.weight"].sbp) == "B, S(0)"
    assert found.storage["layers.0.weight"].sbp == NdSbp.parse("S(0), S(0)")
    for name, stored in found.storage.items():
        assert stored.sbp[1] == BASE.storage[name].sbp[1]
    for name, node in found.nodes.items():
        inputs = zip(node.signature.inputs, BASE.nodes[name].signature.inputs, strict=True)
        assert all(one[1] == other[1] for one, other in inputs)


def test_states_in_host_memory_stay_there():
    states = frozenset(e.name for e in GRAPH.inputs if e.kind is InputKind.OPTIMIZER_STATE)
    base = infer_strategy(
        replace(REQUEST, offloaded=states), planner="test", pins=DATA | REPLICATED
    )

    found = infer_axis(REQUEST, base, axis="data", pins=DATA | REPLICATED)

    assert states
    for one in (base, found):
        assert {name for name, stored in one.storage.items() if stored.offloaded} == states
