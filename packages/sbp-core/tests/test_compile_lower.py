from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.boxing import StepKind, route
from sbp_core.cluster import Link
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.items import Item, ItemKind
from sbp_core.compile.lowering import lower
from sbp_core.errors import PlanError
from sbp_core.graph.ir import (
    GraphInput,
    GraphOutput,
    InputKind,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    ScalarType,
    TensorType,
)
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.sbp import B, NdSbp, P
from sbp_core.testing.graphs import Builder, cluster, mlp
from sbp_core.testing.plans import LINE, diamond, strategy_of

_SPLIT_SUM = {"y": "S(1) | S(0) -> P"}


def _boxing(items: list[Item]) -> list[Item]:
    return [item for item in items if item.step is not None]


def test_without_boxing_items_are_the_nodes() -> None:
    graph = diamond()

    lowered = lower(graph, strategy_of(graph))

    assert [item.name for item in lowered.items] == [node.name for node in graph.nodes]
    assert {item.level for item in lowered.items} == {0}
    assert lowered.results == {"loss": ("loss",)}
    assert lowered.new_states == {"w": "new"}


def test_one_boxing_is_shared_by_all_consumers() -> None:
    graph = diamond()

    lowered = lower(graph, strategy_of(graph, signatures=_SPLIT_SUM))

    made = [item for item in _boxing(lowered.items) if item.inputs == ("y",)]
    assert [item.name for item in made] == ["y@0(B)"]
    assert made[0].step.kind is StepKind.ALL_REDUCE
    assert made[0].asked_by == "a"
    users = [item.name for item in lowered.items if "y@0(B)" in item.inputs]
    assert users == ["a", "b", "g"]  # the backward phase takes the forward's copy


def test_different_targets_are_boxed_apart_but_share_the_way() -> None:
    graph = diamond()
    signatures = {**_SPLIT_SUM, "a": "S(0) -> S(0)"}

    lowered = lower(graph, strategy_of(graph, signatures=signatures))

    targets = {str(item.step.target[1]) for item in _boxing(lowered.items) if "y" in item.name}
    assert targets == {"S(0)", "B"}


def test_a_sharded_parameter_is_gathered_again_for_the_backward_phase() -> None:
    graph = diamond()

    lowered = lower(graph, strategy_of(graph, storage={"w": "S(0)"}))

    gathers = [item for item in _boxing(lowered.items) if item.step.kind is StepKind.ALL_GATHER]
    assert [(item.name, item.phase) for item in gathers] == [
        ("w@0(B)!forward", Phase.FORWARD),
        ("w@0(B)!backward", Phase.BACKWARD),
        ("w@0(B)!optimizer", Phase.OPTIMIZER),
    ]
    by_name = {item.name: item for item in lowered.items}
    assert "w@0(B)!forward" in by_name["y"].inputs
    assert "w@0(B)!backward" in by_name["g"].inputs


def test_a_buffer_is_boxed_apart_for_what_runs_once_a_step() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.add_input("u", InputKind.BUFFER, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("u")), (4, 4))
    b.op("loss", "sum.default", (Ref("y"),), ())
    b.op("g", "mm.default", (Ref("y"), Ref("w")), (4, 4), phase=Phase.BACKWARD)
    at = {"phase": Phase.OPTIMIZER, "pointwise": True}
    b.op("scaled", "mul.Tensor", (Ref("u"), Ref("g")), (4, 4), **at)
    b.op("new", "sub.Tensor", (Ref("w"), Ref("scaled")), (4, 4), **at)
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="new"))
    graph = accumulate(b.graph(), 2)
    strategy = strategy_of(graph, storage={"u": "S(0)"})

    gathers = _boxing(lower(graph, strategy).items)

    assert [(item.name, item.rate) for item in gathers] == [
        ("u@0(B)", Rate.MICRO),
        ("u@0(B)!step", Rate.STEP),
    ]
    check(compile_plan(graph, strategy))


def test_levels_count_the_boxing_steps_on_the_way() -> None:
    graph = diamond()
    signatures = {**_SPLIT_SUM, "loss": "S(0) -> P"}

    lowered = lower(graph, strategy_of(graph, signatures=signatures))

    levels = {item.name: item.level for item in lowered.items}
    assert levels["y"] == 0
    assert levels["y@0(B)"] == 0
    assert levels["a"] == levels["c"] == levels["g"] == 1
    assert levels["loss"] == 1  # B -> S(0) is local: it begins no new segment
    assert levels["loss@0(B)"] == 1


def test_a_local_boxing_is_no_collective() -> None:
    graph = diamond()

    lowered = lower(graph, strategy_of(graph, signatures={"a": "S(0) -> S(0)"}))

    (cut,) = [item for item in _boxing(lowered.items) if item.inputs == ("y",)]
    assert cut.kind is ItemKind.LOCAL


def test_losses_leave_whole_and_states_as_they_are_stored() -> None:
    graph = diamond()
    signatures = {"loss": "S(0) -> P"}

    lowered = lower(graph, strategy_of(graph, signatures=signatures, storage={"w": "S(1)"}))

    (loss,) = lowered.results["loss"]
    assert str(lowered.held[loss].sbp) == "B"
    assert str(lowered.held[lowered.new_states["w"]].sbp) == "S(1)"


def test_a_value_for_another_stage_is_transferred_once() -> None:
    graph = diamond()
    stages = (Placement([0], ["rank"]), Placement([1], ["rank"]))
    later = dict.fromkeys(("a", "b", "c", "loss"), 1)

    lowered = lower(graph, strategy_of(graph, stages, node_stages=later))

    (sent,) = [item for item in _boxing(lowered.items) if item.asked_by]
    assert (sent.kind, sent.stage, sent.target_stage) == (ItemKind.TRANSFER, 0, 1)
    assert lowered.held[sent.outputs[0]].stage == 1
    assert {item.name: item.level for item in lowered.items}["a"] == 1


def test_a_loss_goes_once_to_every_rank_that_has_it_not() -> None:
    graph = diamond()
    one, two, three = (Placement([rank], ["rank"]) for rank in range(3))
    stages = (one, two, Placement([2, 0], ["rank"]), three)
    later = dict.fromkeys(("a", "b", "c", "loss"), 3)

    lowered = lower(graph, strategy_of(graph, stages, node_stages=later))

    assert lowered.results == {"loss": ("loss", "loss@0(B)", "loss@1(B)")}
    copies = [item for item in _boxing(lowered.items) if item.inputs == ("loss",)]
    assert [item.kind for item in copies] == [ItemKind.TRANSFER] * 2
    plan = check(compile_plan(graph, strategy_of(graph, stages, node_stages=later)))
    assert plan is not None


def test_a_loss_is_made_whole_before_it_goes_to_another_stage() -> None:
    graph = diamond()
    stages = (Placement([0], ["rank"]), Placement([1, 2], ["rank"]))
    later = dict.fromkeys(("a", "b", "c", "loss"), 1)
    signatures = {"loss": "S(0) -> P"}

    lowered = lower(graph, strategy_of(graph, stages, signatures=signatures, node_stages=later))

    assert lowered.results == {"loss": ("loss@1(B)", "loss@0(B)")}
    (sent,) = [item for item in _boxing(lowered.items) if "loss@0(B)" in item.outputs]
    assert sent.inputs == ("loss@1(B)",)


def test_stages_on_the_same_ranks_begin_a_new_segment_without_a_transfer() -> None:
    graph = diamond()
    later = dict.fromkeys(("a", "b", "c", "loss"), 1)

    lowered = lower(graph, strategy_of(graph, (LINE, LINE), node_stages=later))

    assert _boxing(lowered.items) == []
    levels = {item.name: item.level for item in lowered.items}
    assert (levels["y"], levels["a"], levels["loss"]) == (0, 1, 1)


def test_aliases_and_updates_sink_to_their_first_user() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("x")), (4, 4))
    b.op("w_t", "t.default", (Ref("w"),), (4, 4))
    b.op("z", "mm.default", (Ref("y"), Ref("w_t")), (4, 4))
    b.op("decay", "mul.Tensor", (Ref("w"), 0.9), (4, 4), phase=Phase.OPTIMIZER, pointwise=True)
    b.op(
        "new", "sub.Tensor", (Ref("decay"), Ref("z")), (4, 4), phase=Phase.OPTIMIZER,
        pointwise=True,
    )  # fmt: skip
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="new"))
    graph = b.graph()
    signatures = {**_SPLIT_SUM, "z": "B | S(1) -> S(1)", "w_t": "S(0) -> S(1)"}

    lowered = lower(graph, strategy_of(graph, signatures=signatures))

    levels = {item.name: item.level for item in lowered.items}
    assert levels["y"] == 0
    assert levels["w_t"] == levels["z"] == 1
    assert levels["decay"] == levels["new"] == 2


def test_an_update_does_not_sink_beyond_a_change_of_stage() -> None:
    graph = diamond()
    b = Builder()
    b.inputs, b.outputs, b.types = list(graph.inputs), [], dict(graph.types)
    b.nodes = [node for node in graph.nodes if node.name in ("y", "a")]
    at = {"phase": Phase.OPTIMIZER, "pointwise": True}
    b.op("first", "neg.default", (Ref("w"),), (4, 4), **at)
    b.op("second", "neg.default", (Ref("first"),), (4, 4), **at)
    b.op("third", "add.Tensor", (Ref("second"), Ref("y")), (4, 4), **at)
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="third"))

    lowered = lower(
        b.graph(),
        strategy_of(b.graph(), (LINE, LINE), signatures=_SPLIT_SUM, node_stages={"second": 1}),
    )

    levels = {item.name: item.level for item in lowered.items}
    assert levels["first"] < levels["second"] < levels["third"]


def test_boxing_that_goes_on_from_a_later_phase_belongs_to_that_phase() -> None:
    square = Placement.grid((2, 2), ("a", "b"))
    graph = diamond()
    both, whole = NdSbp(P, P), NdSbp(B, B)
    way = route((4, 4), "float32", (square, both), (square, whole)).steps
    half = way[0].target[1]
    signatures = {
        "y": f"S(1), S(1) | S(0), S(0) -> {both}",
        "a": f"{both} -> {both}",
        "b": f"{both} -> {both}",
        "c": f"{both} | {both} -> {both}",
        "g": f"{half} | B, B -> {half}",
    }
    linear = [replace(n, op="aten.neg.default") if n.name == "a" else n for n in graph.nodes]
    graph = replace(
        graph.with_nodes(tuple(linear)),
        outputs=(*graph.outputs, GraphOutput(name="y", kind=OutputKind.METRIC, value="y")),
    )

    lowered = lower(graph, strategy_of(graph, (square,), signatures=signatures))

    phases = {item.name: item.phase for item in lowered.items}
    assert phases[f"y@0({half})"] is Phase.BACKWARD
    assert phases[lowered.results["y"][0]] is Phase.BACKWARD


def test_a_strategy_that_lacks_an_op_is_refused() -> None:
    graph = diamond()
    strategy = strategy_of(graph)
    nodes = {name: entry for name, entry in strategy.nodes.items() if name != "a"}

    with pytest.raises(PlanError, match="does not cover the graph") as caught:
        lower(graph, replace(strategy, nodes=nodes))

    assert caught.value.where == ("a has no assignment",)


def test_a_strategy_that_lacks_a_state_is_refused() -> None:
    graph = diamond()

    with pytest.raises(PlanError, match="does not cover the graph") as caught:
        lower(graph, replace(strategy_of(graph), storage={}))

    assert "w has no assignment" in caught.value.where


def test_a_strategy_for_other_micro_batches_is_refused() -> None:
    with pytest.raises(PlanError, match="does not cover the graph") as caught:
        lower(mlp(), replace(strategy_of(mlp()), num_micro_batches=2))

    assert "1 micro-batches" in caught.value.accepted


def test_a_number_read_from_a_tensor_in_the_step_is_refused() -> None:
    graph = diamond()
    node = Node(
        name="read",
        op="host.item",
        args=(Ref("loss"),),
        outputs=("read",),
        phase=Phase.OPTIMIZER,
        rate=Rate.STEP,
    )
    graph = replace(graph, nodes=(*graph.nodes, node), types={**graph.types, "read": ScalarType()})

    with pytest.raises(PlanError, match="a host number is read from a tensor"):
        lower(graph, strategy_of(graph))


def test_a_state_that_becomes_an_input_unchanged_is_refused() -> None:
    graph = diamond()
    graph = replace(
        graph,
        inputs=(*graph.inputs, GraphInput(name="old", kind=InputKind.BUFFER)),
        types={**graph.types, "old": TensorType((4, 4), "float32")},
        outputs=(*graph.outputs, GraphOutput(name="old", kind=OutputKind.STATE, value="x")),
    )

    with pytest.raises(PlanError, match="output 'old' is the input 'x' itself") as caught:
        lower(graph, strategy_of(graph))

    assert "an op makes" in caught.value.accepted


def test_what_a_machine_says_decides_how_a_value_goes_to_another_stage() -> None:
    graph = diamond()
    stages = (Placement([0, 1], ["rank"]), Placement([2, 3], ["rank"]))
    later = dict.fromkeys(("a", "b", "c", "loss"), 1)
    strategy = strategy_of(graph, stages, node_stages=later)
    near = Link(latency_s=0.0, bytes_per_s=1e12)
    far = Link(latency_s=0.0, bytes_per_s=1e3)
    nodes = replace(cluster(), devices_per_node=2, intra_node=near, inter_node=far)

    plain, priced = (lower(graph, strategy, machine) for machine in (None, nodes))

    assert [item.kind for item in _boxing(plain.items) if item.asked_by] == [ItemKind.TRANSFER]
    sent, gathered = (item for item in _boxing(priced.items) if item.asked_by)
    assert (sent.kind, sent.target_stage) == (ItemKind.TRANSFER, 1)
    assert (gathered.kind, gathered.stage) == (ItemKind.COLLECTIVE, 1)
    assert gathered.inputs == sent.outputs
    assert check(compile_plan(graph, strategy, CompileOptions(cluster=nodes))) is not None
