from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sbp_core.errors import GraphError, SbpValueError
from sbp_core.graph import GRAPH, LogicalGraph, graph_hash, serialize
from sbp_core.graph.ir import Argument, GraphInput, InputKind, Ref, ScalarType, Symbol
from sbp_core.serialize import dump, load
from sbp_core.testing.graphs import Builder, chain, mlp


def _through_text(graph: LogicalGraph) -> LogicalGraph:
    return GRAPH.load(json.loads(json.dumps(GRAPH.dump(graph))))


@pytest.mark.parametrize("graph", [chain(), mlp(), mlp(num_micro_batches=3)])
def test_a_graph_survives_json(graph: LogicalGraph) -> None:
    copy = _through_text(graph)

    assert copy == graph
    assert graph_hash(copy) == graph_hash(graph)


@pytest.mark.parametrize(
    "argument",
    [
        None,
        True,
        3,
        0.1,
        float("inf"),
        float("-inf"),
        "mean",
        Ref("a"),
        Symbol("dtype", "float32"),
        (Ref("a"), (1, 2), ()),
    ],
)
def test_every_argument_survives_json(argument: object) -> None:
    text = json.dumps(dump((argument,), tuple[Argument]), allow_nan=False)
    (copy,) = load(json.loads(text), tuple[Argument])

    assert copy == argument
    assert type(copy) is type(argument)


def test_not_a_number_survives_json() -> None:
    (copy,) = load(dump((float("nan"),), tuple[Argument]), tuple[Argument])

    assert copy != copy


@pytest.mark.parametrize("value", [{"ref": 1}, {}, {"dtype": "a", "ref": "b"}, {"class": "os"}])
def test_what_is_no_argument_is_refused(value: object) -> None:
    with pytest.raises(SbpValueError, match=r"\[0\]: an object with the keys"):
        load([[1, value]], tuple[Argument])


def test_host_scalars_survive_json() -> None:
    graph = chain()
    graph = replace(
        graph,
        inputs=(*graph.inputs, GraphInput(name="lr", kind=InputKind.SCALAR, stands_for=("a",))),
        types={**graph.types, "lr": ScalarType("int")},
    )

    assert _through_text(graph) == graph


def test_another_format_is_refused() -> None:
    with pytest.raises(GraphError, match="its version is 99") as caught:
        GRAPH.load({**GRAPH.dump(chain()), "version": 99})

    assert caught.value.accepted == '"version": 2'


def test_the_hash_of_a_known_graph_is_known() -> None:
    assert graph_hash(chain()) == "c428e60a07206209"
    assert graph_hash(mlp(num_micro_batches=2)) == "8a5e5ec16f8e0fbe"


def test_the_hash_does_not_change_with_source_lines() -> None:
    graph = chain()
    moved = graph.with_nodes(tuple(replace(node, source="m.py:9") for node in graph.nodes))

    assert moved != graph
    assert graph_hash(moved) == graph_hash(graph)


def _with_first_node(graph: LogicalGraph, **changes: object) -> LogicalGraph:
    first, *rest = graph.nodes
    return graph.with_nodes((replace(first, **changes), *rest))


def test_the_hash_changes_with_what_is_computed() -> None:
    graph = chain()
    others = [
        chain(batch=6),
        replace(graph, num_micro_batches=2),
        replace(graph, outputs=()),
        _with_first_node(graph, op="aten.bmm.default"),
        _with_first_node(graph, args=(Ref("w"), Ref("x"))),
        _with_first_node(graph, kwargs={"scale": 2}),
        _with_first_node(graph, module="other"),
        mlp(),
    ]

    hashes = {graph_hash(graph), *map(graph_hash, others)}

    assert len(hashes) == 1 + len(others)


def test_the_hash_does_not_depend_on_the_order_of_types() -> None:
    graph = chain()

    assert graph_hash(replace(graph, types=dict(reversed(graph.types.items())))) == graph_hash(
        graph
    )


def test_arguments_of_one_and_one_point_nought_differ() -> None:
    def scaled(factor: float) -> LogicalGraph:
        b = Builder()
        b.add_input("x", InputKind.BATCH, (2, 2))
        b.op("mul", "mul.Tensor", (Ref("x"), factor), (2, 2))
        return b.graph()

    assert graph_hash(scaled(1)) != graph_hash(scaled(1.0))


def test_a_graph_is_hashed_once_and_another_one_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[LogicalGraph] = []

    def noted(graph: LogicalGraph) -> object:
        hashed.append(graph)
        return GRAPH.dump(graph)

    monkeypatch.setattr(serialize, "GRAPH", SimpleNamespace(dump=noted))
    graph = mlp()
    other = replace(graph, num_micro_batches=2)

    assert graph_hash(graph) == graph_hash(graph) != graph_hash(other)

    assert len(hashed) == 2 and hashed[0] is graph and hashed[1] is other
