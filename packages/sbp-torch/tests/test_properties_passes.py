"""Any graph computes the same after any pass, and every value is of the type it is said to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import graphs, random_values

from sbp_aten.pass_options import MixedPrecision, PassOptions
from sbp_aten.passes import (
    drop_identities,
    fold_constants,
    fold_views,
    mixed_precision,
    place_casts,
    prepare_step,
    share_expressions,
    sum_losses,
    tie_step_counters,
)
from sbp_aten.passes.pipeline import chosen_passes
from sbp_core.graph import LogicalGraph, Node, verify_graph
from sbp_core.graph.ir import Ref, Symbol, TensorType
from sbp_core.graph.rewrite import rename_outputs, rename_uses
from sbp_torch.ops.operators import bind, operator_of, results_of
from sbp_torch.runtime.single import run_graph

Pass = Callable[[LogicalGraph], LogicalGraph]

_EXACT: dict[str, Pass] = {
    "tie_step_counters": tie_step_counters,
    "fold_constants": fold_constants,
    "drop_identities": drop_identities,
    "fold_views": fold_views,
    "share_expressions": share_expressions,
    "sum_losses": sum_losses,
    "place_casts": place_casts,
    "prepare_step": prepare_step,
}

#: Detours that give back a matrix: operators, each with what follows the argument.
_DETOURS: tuple[tuple[tuple[str, tuple[object, ...]], ...], ...] = (
    (("mul.Tensor", (1,)),),
    (("div.Tensor", (1.0,)),),
    (("sub.Tensor", (0,)),),
    (("add.Tensor", (0.0,)),),
    (("clone.default", ()),),
    (("alias.default", ()),),
    (("_to_copy.default", ()),),
    (("neg.default", ()), ("neg.default", ())),
    (("t.default", ()), ("t.default", ())),
    (("transpose.int", (0, 1)), ("transpose.int", (-1, -2))),
    (("permute.default", ((1, 0),)), ("permute.default", ((1, 0),))),
    (("unsqueeze.default", (1,)), ("squeeze.dim", (1,))),
)


@st.composite
def _roundabout(draw: st.DrawFn) -> LogicalGraph:
    """Draw a graph in which some arguments come by a detour, and some nodes are there twice."""
    graph = draw(graphs(draw(st.sampled_from((1, 3)))))
    types, nodes = dict(graph.types), []
    twins: dict[str, str] = {}
    for node in graph.nodes:
        user = rename_uses(node, twins) if draw(st.booleans()) else node
        for value in dict.fromkeys(user.inputs()):
            if len(types[value].shape) == 2 and draw(st.integers(0, 2)) == 0:
                around = _detour(draw, types, node, value, len(nodes))
                nodes += around
                user = rename_uses(user, {value: around[-1].outputs[0]})
        nodes.append(user)
        if draw(st.integers(0, 3)) == 0 and node.op != "sbp.accumulate":
            made = tuple(f"{value}.twin" for value in node.outputs)
            nodes.append(replace(user, name=f"{node.name}.twin", outputs=made))
            types |= {twin: types[value] for twin, value in zip(made, node.outputs, strict=True)}
            twins |= dict(zip(node.outputs, made, strict=True))
    ends = {out.value: twins.get(out.value, out.value) for out in graph.outputs}
    outputs = rename_outputs(graph.outputs, ends if draw(st.booleans()) else {})
    return verify_graph(graph.with_nodes(tuple(nodes), types=types, outputs=outputs))


def _detour(
    draw: st.DrawFn, types: dict[str, Any], user: Node, value: str, number: int
) -> list[Node]:
    """Return nodes after which a value is what it was, run when its user runs."""
    made: list[Node] = []
    dtype = types[value].dtype
    sample = torch.empty(types[value].shape, dtype=getattr(torch, dtype))
    for index, (op, rest) in enumerate(draw(st.sampled_from(_DETOURS))):
        converts = op == "_to_copy.default"
        called = operator_of(f"aten.{op}")
        named = {"dtype": sample.dtype} if converts else {}
        sample = called(sample, *bind(rest, {}.__getitem__), **named)
        name = f"{value}.by.{number}.{index}"
        types[name] = TensorType(tuple(sample.shape), dtype)
        made.append(
            Node(
                name=name,
                op=f"aten.{op}",
                args=(Ref(made[-1].outputs[0] if made else value), *rest),
                kwargs={"dtype": Symbol("dtype", dtype)} if converts else {},
                outputs=(name,),
                phase=user.phase,
                rate=user.rate,
                tags=("pointwise",) if torch.Tag.pointwise in called.tags else (),
            )
        )
    return made


def _same_bits(one: object, other: object) -> bool:
    a, b = torch.as_tensor(one), torch.as_tensor(other)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not torch.equal(a.isnan(), b.isnan()):
        return False
    a, b = a.where(~a.isnan(), 0), b.where(~b.isnan(), 0)
    return torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())


def _types_hold(graph: LogicalGraph, seed: int) -> None:
    """Run every node of one micro-batch, and compare what it makes with what the graph says."""
    states, batches = random_values(graph, seed)
    values: dict[str, Any] = {**_cast(states, graph), **_cast(batches[0], graph)}
    for node in graph.nodes:
        args = bind(node.args, values.__getitem__)
        kwargs = {key: bind(value, values.__getitem__) for key, value in node.kwargs.items()}
        if node.op == "sbp.accumulate":
            made = (args[0] * args[1] if args[1] is not None else args[0],)
        else:
            made = results_of(operator_of(node.op)(*args, **kwargs))
        for name, value in zip(node.outputs, made, strict=True):
            dtype = str(value.dtype).removeprefix("torch.")
            assert TensorType(tuple(value.shape), dtype) == graph.types[name], node
            values[name] = value


def _cast(values: Mapping[str, Any], graph: LogicalGraph) -> dict[str, Any]:
    return {k: v.to(getattr(torch, graph.tensor(k).dtype)) for k, v in values.items()}


_QUICK = settings(max_examples=30, deadline=None, derandomize=True)
_LONG = settings(max_examples=400, deadline=None, derandomize=True)


def _stays(name: str, graph: LogicalGraph, seed: int) -> None:
    states, batches = random_values(graph, seed)

    made = verify_graph(_EXACT[name](graph))

    outputs, expected = run_graph(graph, states, batches, {})
    found, new = run_graph(made, states, batches, {})
    assert all(_same_bits(found[key], value) for key, value in outputs.items())
    assert all(_same_bits(new[key], value) for key, value in expected.items())
    _types_hold(made, seed)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", _EXACT)
@_QUICK
@given(data=st.data())
def test_any_graph_computes_the_same_bits_after_a_pass(name: str, data: st.DataObject) -> None:
    _stays(name, data.draw(_roundabout(), "graph"), data.draw(st.integers(0, 9), "seed"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", _EXACT)
@_LONG
@given(data=st.data())
def test_many_graphs_compute_the_same_bits_after_a_pass(name: str, data: st.DataObject) -> None:
    _stays(name, data.draw(_roundabout(), "graph"), data.draw(st.integers(0, 9), "seed"))


def _in_float32(graph: LogicalGraph) -> LogicalGraph:
    narrow = {
        name: replace(kind, dtype="float32") if kind.dtype == "float64" else kind
        for name, kind in graph.types.items()
        if isinstance(kind, TensorType)
    }
    nodes = tuple(
        replace(node, kwargs={"dtype": Symbol("dtype", "float32")})
        if node.kind == "_to_copy"
        else node
        for node in graph.nodes
    )
    return replace(graph, types=narrow, nodes=nodes)


@_QUICK
@given(graph=_roundabout(), seed=st.integers(0, 9), kept=st.booleans())
def test_in_mixed_precision_every_value_is_of_the_type_it_is_said_to_be(
    graph: LogicalGraph, seed: int, kept: bool
) -> None:
    graph = _in_float32(graph)
    how = MixedPrecision(lower=("embedding",), keep=("mm",) if kept else ())

    made = verify_graph(place_casts(verify_graph(mixed_precision(graph, how))))

    _types_hold(made, seed)
    ends = zip(graph.outputs, made.outputs, strict=True)
    assert all(made.types[new.value] == graph.types[old.value] for old, new in ends)


@_QUICK
@given(graph=_roundabout())
def test_cleaning_up_twice_changes_nothing_more(graph: LogicalGraph) -> None:
    once = PassOptions(mixed_precision=None)
    passes = [apply for _, apply in chosen_passes(once) if apply is not tie_step_counters]
    for apply in passes:
        graph = apply(graph)

    again = graph
    for apply in passes:
        again = apply(again)

    assert len(again.nodes) <= len(graph.nodes)
    for apply in passes:
        assert len(apply(again).nodes) == len(again.nodes)
