from __future__ import annotations

import pytest

from sbp_core.errors import GraphError
from sbp_core.graph.ir import (
    GraphInput,
    InputKind,
    Node,
    Rate,
    Ref,
    ScalarType,
    Symbol,
    TensorType,
    map_refs,
    refs,
)
from sbp_core.testing.graphs import Builder, chain, mlp


def test_a_type_knows_its_bytes_and_prints() -> None:
    assert TensorType((3, 4), "float32").size_bytes == 48
    assert TensorType((), "float64").size_bytes == 8
    assert TensorType((0, 4), "bool").size_bytes == 0
    assert str(TensorType((3, 4), "bfloat16")) == "bfloat16[3, 4]"
    assert str(ScalarType("int")) == "host int"


def test_refs_are_found_in_order_in_nested_arguments() -> None:
    argument = (Ref("a"), 2.0, (Ref("b"), (Ref("a"), None)), Symbol("dtype", "float32"))

    assert [ref.name for ref in refs(argument)] == ["a", "b", "a"]


def test_map_refs_replaces_refs_and_nothing_else() -> None:
    argument = (Ref("a"), "a", [Ref("b"), 1])

    changed = map_refs(argument, lambda ref: Ref(ref.name.upper()))

    assert changed == (Ref("A"), "a", (Ref("B"), 1))


def test_a_node_lists_its_inputs_with_repetitions() -> None:
    node = Node(
        name="n",
        op="aten.cat.default",
        args=((Ref("a"), Ref("b"), Ref("a")), 1),
        kwargs={"out": Ref("c")},
        outputs=("n",),
    )

    assert node.inputs() == ("a", "b", "a", "c")
    assert node.kind == "cat"
    assert not node.is_host
    assert Node(name="h", op="host.add", args=(1, 2), outputs=("h",)).is_host


def test_a_node_says_where_it_is() -> None:
    bare = Node(name="n", op="aten.t.default", args=(Ref("a"),), outputs=("n",))
    placed = Node(
        name="n", op="aten.t.default", args=(), outputs=("n",), module="head", source="m.py:7"
    )

    assert bare.where() == ("op aten.t.default of module '(root)' (n)",)
    assert placed.where() == ("m.py:7, op aten.t.default of module 'head' (n)",)


def test_producers_users_and_names() -> None:
    graph = chain()

    assert graph.producers["act.relu"].name == "act.relu"
    assert "x" not in graph.producers
    assert [user.name for user in graph.users["lin.mm"]] == ["act.relu"]
    assert graph.users["sum"] == ()
    assert graph.by_name["lin.mm"].module == "lin"
    assert graph.input_kinds["w"].kind is InputKind.PARAMETER
    assert graph.loss == "sum"


def test_a_user_is_listed_once_although_it_uses_a_value_twice() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 2))
    b.op("square", "mul.Tensor", (Ref("x"), Ref("x")), (2, 2))

    graph = b.graph()

    assert [user.name for user in graph.users["x"]] == ["square"]
    assert graph.tensor_inputs(graph.by_name["square"]) == ("x", "x")


def test_new_states_map_each_replaced_state_to_its_value() -> None:
    graph = mlp()

    assert graph.new_states["layers.0.weight"] == "layers.0.weight.update.addcdiv"
    assert set(graph.new_states) == {e.name for e in graph.inputs if e.kind.is_state}


def test_a_graph_without_loss_says_so() -> None:
    with pytest.raises(GraphError, match="has no loss"):
        _ = Builder().graph().loss


def test_rates_follow_inputs_nodes_and_accumulation() -> None:
    graph = mlp(num_micro_batches=2)

    assert graph.rate_of("x") is Rate.MICRO
    assert graph.rate_of("layers.0.weight") is Rate.STEP
    assert graph.rate_of("layers.0.grad.mm") is Rate.MICRO
    assert graph.rate_of("layers.0.grad.mm.mean") is Rate.STEP
    assert graph.rate_of("layers.0.weight.update.lerp") is Rate.STEP


def test_with_nodes_drops_types_that_nobody_has() -> None:
    graph = chain()

    shorter = graph.with_nodes(graph.nodes[:1], outputs=())

    assert set(shorter.types) == {"w", "x", "lin.mm"}
    assert set(graph.types) == {"w", "x", "lin.mm", "act.relu", "sum"}


def test_only_parameters_buffers_and_optimizer_states_outlive_a_step() -> None:
    states = {kind for kind in InputKind if kind.is_state}

    assert states == {InputKind.PARAMETER, InputKind.BUFFER, InputKind.OPTIMIZER_STATE}
    assert GraphInput(name="x", kind=InputKind.BATCH).stands_for == ()
