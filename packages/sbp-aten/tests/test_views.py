"""The one list of operators that alias, against the schemas of ATen."""

from __future__ import annotations

import pytest
import torch

from sbp_aten.traits import VIEWS
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Rate, Ref
from sbp_core.passes import unalias_outputs as unalias_outputs
from sbp_core.signatures.views import aliased_inputs
from sbp_core.testing.graphs import Builder

#: Of sparse and nested tensors, of other containers, of devices, and of forward-mode gradients.
_NEVER_TRACED = frozenset(
    {"__getitem__", "_autocast_to_full_precision", "_autocast_to_reduced_precision", "_indices"}
    | {"_grad_sum_to_size", "_make_dual", "_unpack_dual", "_unwrap_optional", "_values", "values"}
    | {"_sparse_broadcast_to", "ccol_indices", "coalesce", "col_indices", "cpu", "crow_indices"}
    | {"cuda", "get", "indices", "keys", "local_value", "row_indices", "to_here", "as_tensor"}
    | {"align_to", "refine_names", "rename"}
)


def test_every_operator_whose_schema_aliases_is_listed() -> None:
    found = {
        schema.name.removeprefix("aten::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and not schema.is_mutable
        and any(made.alias_info is not None for made in schema.returns)
    }
    plain = {name for name in found if not name.startswith(("_nested_", "_ncf_", "_test_"))}

    assert len(found) > 50
    assert not plain - VIEWS - _NEVER_TRACED


def _reporting(kind: InputKind) -> Builder:
    """Return a graph whose state `u`, and whose metrics, look at an input."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2, 3))
    b.add_input("w", kind, (2, 3))
    b.add_input("u", InputKind.BUFFER, (3, 2))
    b.op("loss", "sum.default", (Ref("x"),), ())
    b.op("t", "t.default", (Ref("x"),), (3, 2))
    b.op("s", "select.int", (Ref("w"), 0, 0), (3,))
    for name, output, value in (
        ("u", OutputKind.STATE, "t"),
        ("row", OutputKind.METRIC, "s"),
        ("seen", OutputKind.METRIC, "w"),
    ):
        b.outputs.append(GraphOutput(name=name, kind=output, value=value))
    return b


def test_states_and_metrics_lie_in_memory_of_their_own() -> None:
    graph = unalias_outputs(_reporting(InputKind.PARAMETER).graph())

    values = {out.name: out.value for out in graph.outputs}
    copies = {node.outputs[0]: node for node in graph.nodes if node.op == "aten.clone.default"}
    assert set(copies) == {values["u"], values["seen"]}
    assert copies[values["u"]].rate is Rate.MICRO
    assert copies[values["seen"]].rate is Rate.STEP
    assert list(aliased_inputs(graph, "t")) == ["x"]
    assert not set(aliased_inputs(graph, values["u"])) & {"x"}
    # A view of a parameter is made in the step and may stay one.
    assert values["row"] == "s"
    assert unalias_outputs(graph) is graph


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        ("_unsafe_view", [8]),
        ("unsafe_chunk", 2),
        ("unsafe_split", 2),
        ("unsafe_split_with_sizes", [1, 3]),
    ],
)
def test_what_looks_at_its_argument_without_saying_so_is_a_view(op: str, argument: object) -> None:
    x = torch.zeros(4, 2)

    made = getattr(torch.ops.aten, op)(x, argument)

    for one in made if isinstance(made, list) else [made]:
        assert one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert op in VIEWS
