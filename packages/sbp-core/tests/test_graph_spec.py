from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sbp_core.errors import GraphError
from sbp_core.graph import LogicalGraph, verify_graph
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
from sbp_core.testing.graphs import chain, mlp


def test_legal_graphs_are_returned() -> None:
    for graph in (chain(), mlp(), mlp(num_micro_batches=4)):
        assert verify_graph(graph) is graph


def _with_node(graph: LogicalGraph, kind: object, **fields: object) -> LogicalGraph:
    """Append a node whose output `new` has the type `kind`."""
    node = Node(**{"name": "new", "outputs": ("new",), "args": (), **fields})
    types = {**graph.types, "new": kind} if kind is not None else graph.types
    return replace(graph, nodes=(*graph.nodes, node), types=types)


def _two_inputs_of_one_name() -> LogicalGraph:
    graph = chain()
    return replace(graph, inputs=(*graph.inputs, graph.inputs[0]))


def _two_nodes_of_one_name() -> LogicalGraph:
    return _with_node(chain(), TensorType((8, 4), "float32"), name="lin.mm", op="aten.relu.default")


def _use_before_making() -> LogicalGraph:
    graph = chain()
    return replace(graph, nodes=graph.nodes[::-1])


def _value_made_twice() -> LogicalGraph:
    return _with_node(chain(), None, op="aten.relu.default", outputs=("sum",))


def _value_without_type() -> LogicalGraph:
    return _with_node(chain(), None, op="aten.relu.default", args=(Ref("x"),))


def _output_that_nothing_makes() -> LogicalGraph:
    return replace(
        chain(), outputs=(GraphOutput(name="loss", kind=OutputKind.LOSS, value="nothing"),)
    )


def _operator_without_namespace() -> LogicalGraph:
    return _with_node(chain(), TensorType((), "float32"), op="relu")


def _operator_with_an_empty_part() -> LogicalGraph:
    return _with_node(chain(), TensorType((), "float32"), op="aten..default")


def _host_op_that_makes_a_tensor() -> LogicalGraph:
    return _with_node(chain(), TensorType((), "float32"), op="host.add")


def _op_that_makes_a_number() -> LogicalGraph:
    return _with_node(chain(), ScalarType(), op="aten.relu.default", args=(Ref("x"),))


def _host_op_on_a_tensor() -> LogicalGraph:
    return _with_node(chain(), ScalarType(), op="host.add", args=(Ref("x"), 1))


def _micro_batch_value_at_step_rate() -> LogicalGraph:
    return _with_node(
        replace(chain(), num_micro_batches=2),
        TensorType((8, 4), "float32"),
        op="aten.relu.default",
        args=(Ref("act.relu"),),
        phase=Phase.OPTIMIZER,
        rate=Rate.STEP,
    )


def _step_value_at_micro_batch_rate() -> LogicalGraph:
    return _with_node(
        mlp(num_micro_batches=2),
        TensorType((4, 8), "float32"),
        op="aten.relu.default",
        args=(Ref("layers.0.weight.update.lerp"),),
    )


def _step_value_in_the_forward_of_one_micro_batch() -> LogicalGraph:
    graph = _step_value_at_micro_batch_rate()
    return replace(graph, num_micro_batches=1)


def _input_without_type() -> LogicalGraph:
    graph = chain()
    return replace(graph, types={name: kind for name, kind in graph.types.items() if name != "x"})


def _value_of_type(kind: TensorType | ScalarType) -> LogicalGraph:
    graph = chain()
    return replace(graph, types={**graph.types, "x": kind})


def _two_losses() -> LogicalGraph:
    graph = chain()
    return replace(
        graph,
        outputs=(*graph.outputs, GraphOutput(name="again", kind=OutputKind.LOSS, value="sum")),
    )


def _loss_with_dims() -> LogicalGraph:
    return replace(
        chain(), outputs=(GraphOutput(name="loss", kind=OutputKind.LOSS, value="act.relu"),)
    )


def _loss_on_the_host() -> LogicalGraph:
    graph = chain()
    return replace(
        graph,
        inputs=(*graph.inputs, GraphInput(name="lr", kind=InputKind.SCALAR)),
        outputs=(GraphOutput(name="loss", kind=OutputKind.LOSS, value="lr"),),
        types={**graph.types, "lr": ScalarType()},
    )


def _new_value_of_a_batch_input() -> LogicalGraph:
    return replace(
        chain(), outputs=(GraphOutput(name="x", kind=OutputKind.STATE, value="act.relu"),)
    )


def _new_value_of_another_shape() -> LogicalGraph:
    return replace(chain(), outputs=(GraphOutput(name="w", kind=OutputKind.STATE, value="sum"),))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_two_inputs_of_one_name, "two inputs of one name"),
        (_two_nodes_of_one_name, "two nodes are called 'lin.mm'"),
        (_use_before_making, "'act.relu' is used before it is made"),
        (_value_made_twice, "'sum' is made twice"),
        (_value_without_type, "'new' has no type"),
        (_output_that_nothing_makes, "output 'loss' is 'nothing', which nothing makes"),
        (_operator_without_namespace, "'relu' is no operator name"),
        (_operator_with_an_empty_part, "'aten..default' is no operator name"),
        (_host_op_that_makes_a_tensor, "host ops make host scalars, other ops tensors"),
        (_op_that_makes_a_number, "host ops make host scalars, other ops tensors"),
        (_host_op_on_a_tensor, "a host op uses a tensor"),
        (_micro_batch_value_at_step_rate, "made for each micro-batch, but used once a step"),
        (_step_value_at_micro_batch_rate, "made once a step, but used for each micro-batch"),
        (
            _step_value_in_the_forward_of_one_micro_batch,
            "made once a step, but used for each micro-batch",
        ),
        (_input_without_type, "the input 'x' has no type"),
        (lambda: _value_of_type(TensorType((8, 4), "float33")), r"'x' is float33\[8, 4\]"),
        (lambda: _value_of_type(TensorType((8, -4), "float32")), r"'x' is float32\[8, -4\]"),
        (lambda: _value_of_type(ScalarType("float32")), "'x' is host float32"),
        (_two_losses, "has 2 losses"),
        (_loss_with_dims, r"the loss 'act.relu' is float32\[8, 4\]"),
        (_loss_on_the_host, "the loss 'lr' is host float"),
        (_new_value_of_a_batch_input, "output 'x' replaces no state"),
        (_new_value_of_another_shape, r"the new value of 'w' is float32\[\]"),
    ],
)
def test_each_rule_that_is_broken_is_named(
    broken: Callable[[], LogicalGraph], message: str
) -> None:
    with pytest.raises(GraphError, match=message):
        verify_graph(broken())


def test_an_error_names_the_node() -> None:
    with pytest.raises(GraphError) as caught:
        verify_graph(_micro_batch_value_at_step_rate())

    assert "op aten.relu.default" in caught.value.where[0]
    assert "sbp.accumulate" in caught.value.accepted


def test_reading_a_number_from_a_tensor_is_legal() -> None:
    graph = chain()

    verify_graph(_with_node(graph, ScalarType(), op="host.item", args=(Ref("sum"),)))
