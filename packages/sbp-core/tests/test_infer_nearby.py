from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.compile import check_strategy, compile_plan
from sbp_core.errors import PlanError
from sbp_core.infer import infer_nearby, infer_strategy, resolve_pins
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.sbp import NdSbp
from sbp_core.testing.graphs import cluster, mlp

GRAPH = mlp((8, 16, 16, 8), batch=32)
AXES = ("data", "tensor")
DATA_PARALLEL = {
    "batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}


def request_of(**pins):
    return PlanRequest(graph=GRAPH, mesh=Placement.grid((2, 2), AXES), cluster=cluster(), pins=pins)


BASE = infer_strategy(request_of(), planner="test", pins=DATA_PARALLEL)


def changed_nodes(strategy):
    return {name for name, found in strategy.nodes.items() if found != BASE.nodes[name]}


def test_without_pins_nothing_changes():
    found = infer_nearby(request_of(), BASE)

    assert found.modules == ()
    assert found.strategy == replace(BASE, report={})


def test_a_pin_of_storage_changes_its_module_alone():
    found = infer_nearby(request_of(), BASE, {"layers.1.weight": {"tensor": "S(0)"}})

    assert found.modules == ("layers.1",)
    assert found.strategy.storage["layers.1.weight"].sbp[1] == NdSbp.parse("S(0)")[0]
    others = {name for name in BASE.storage if not name.startswith("layers.1.")}
    assert {name: found.strategy.storage[name] for name in others} == {
        name: BASE.storage[name] for name in others
    }
    assert all(name.startswith("layers.1.") for name in changed_nodes(found.strategy))


def test_pins_of_the_user_give_way_to_those_of_the_request():
    asked = request_of(**{"layers.1.weight": "B"})

    found = infer_nearby(asked, BASE, {"layers.1.weight": "S(0)"})

    assert str(found.strategy.storage["layers.1.weight"].sbp) == "B, B"


def test_what_no_operator_can_take_is_refused_with_what_it_takes():
    with pytest.raises(PlanError, match="cannot take") as caught:
        infer_nearby(request_of(), BASE, {"layers.0": "P"})

    assert "S(0)" in caught.value.accepted


ENTRIES = st.sampled_from(["B", "S(0)", "S(1)"])
PATTERNS = st.sampled_from(
    ["layers.0", "layers.1", "layers.0.weight", "use:layers.1.weight", "layers.*.weight"]
)


@pytest.mark.slow
@settings(max_examples=30)
@given(PATTERNS, ENTRIES, ENTRIES)
def test_a_pin_that_can_hold_holds_and_the_plan_is_legal(pattern, data, tensor):
    pin = {pattern: {"data": data, "tensor": tensor}}

    try:
        found = infer_nearby(request_of(), BASE, pin)
    except PlanError as error:
        assert error.accepted
        return

    check_strategy(GRAPH, found.strategy)
    compile_plan(GRAPH, found.strategy)
    pins = resolve_pins(GRAPH, AXES, pin)
    for (name, axis), one in pins.storage.items():
        assert found.strategy.storage[name].sbp[axis] == one.entry
    for (value, axis), one in pins.use.items():
        for user in GRAPH.users[value]:
            if user.is_host:
                continue
            taken = found.strategy.nodes[user.name].signature.inputs
            places = [at for at, name in enumerate(GRAPH.tensor_inputs(user)) if name == value]
            assert all(taken[at][axis] == one.entry for at in places)
