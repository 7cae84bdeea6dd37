"""Mistakes that other systems made or that we made, each with its story and its numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sbp_core.boxing import route
from sbp_core.compile import compile_plan
from sbp_core.errors import SignatureError
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.graph.serialize import graph_hash
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.sbp import NdSbp
from sbp_core.signatures import check_signature, derive, enumerate_signatures, legal_signatures
from sbp_core.strategy import Assignment, Signature, Storage, Strategy
from sbp_core.testing.graphs import Builder
from sbp_torch.signatures.torch_call import abstract_call
from sbp_torch.signatures.verification import verify


def texts(op: str, /, *args: object, axis_size: int = 2, **kwargs: object) -> list[str]:
    return [str(part) for part in legal_signatures(op, *args, axis_size=axis_size, **kwargs)]


def test_pytorch_159856_a_norm_of_partial_sums_is_refused() -> None:
    """The 2-norm of P(sum) shards was computed shard by shard, and summed."""
    for order in (2.0, 3.0, 1.0, 0.0):
        legal = texts("aten.linalg_vector_norm.default", (6, 4), order)

        assert not any(text.startswith("P ") for text in legal), order
        assert verify("aten.linalg_vector_norm.default", torch.randn(6, 5), order).ok


def test_pytorch_159856_the_norms_that_are_reductions_stay_partial() -> None:
    taxicab = texts("aten.linalg_vector_norm.default", (6, 4), 1.0)
    largest = texts("aten.linalg_vector_norm.default", (6, 4), float("inf"))
    euclidean = texts("aten.linalg_vector_norm.default", (6, 4), 2.0)

    assert "S(0) -> P" in taxicab
    assert 'S(0) -> P("max")' in largest
    assert euclidean == ["B -> B"]


@pytest.mark.parametrize("op", ["aten.relu.default", "aten.clamp.default", "aten.maximum.default"])
def test_pytorch_165962_maxima_of_partial_sums_are_refused(op: str) -> None:
    """max, min and clip took the maximum of summands."""
    more: dict[str, list[object]] = {
        "aten.clamp.default": [-1.0, 1.0],
        "aten.maximum.default": [(6, 4)],
    }
    call = abstract_call(op, [(6, 4), *more.get(op, [])], {})
    partial = tuple(NdSbp.parse("P") for _ in call.inputs)

    with pytest.raises(SignatureError, match="cannot take P of 'input0'"):
        check_signature(call, Signature(partial, (NdSbp.parse("P"),)), Placement.grid((2,)))


def test_pytorch_163193_a_number_is_not_added_to_every_summand() -> None:
    """`partial + 10` added 10 on every rank."""
    assert "P -> P" not in texts("aten.add.Scalar", (6, 4), 10)
    assert "P, B -> P" not in texts("aten.add.Tensor", (6, 4), ())
    assert "P, P -> P" in texts("aten.add.Tensor", (6, 4), ())
    assert verify("aten.add.Tensor", torch.randn(6, 5), torch.tensor(10)).ok


@pytest.mark.parametrize("axis_size", [2, 3, 4, 6])
def test_pytorch_162692_the_mean_of_uneven_shards_is_the_mean(axis_size: int) -> None:
    """An average of averages weighs a short shard like a long one, and an empty one gives NaN."""
    x = torch.arange(5, dtype=torch.float64)

    report = verify("aten.mean.dim", x, [0], axis_sizes=(axis_size,))

    assert report.ok, str(report)
    assert "S(0) -> P" in texts("aten.mean.dim", (5,), [0], axis_size=axis_size)


def test_pytorch_166598_a_contracted_dim_on_two_axes_is_cut_in_one_order() -> None:
    """Two operands whose shards came in different orders were multiplied all the same."""
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 4, dtype=torch.float64)
    both = "(S(1), S(1)) (S(0), S(0)) -> (P, P)"

    legal = [
        f"({one.inputs[0]}) ({one.inputs[1]}) -> ({one.outputs[0]})"
        for one in enumerate_signatures(abstract_call("aten.mm.default", [a, b], {}), (2, 2))
    ]

    assert both in legal
    assert verify("aten.mm.default", a, b, axis_sizes=(2,)).ok


@pytest.mark.parametrize("extent", [1, 2, 5, 7])
def test_pytorch_172812_a_function_of_shards_knows_how_long_each_is(extent: int) -> None:
    """`local_map` took every shard for as long as the first."""
    report = verify("aten.mul.Tensor", torch.randn(extent, 3), torch.randn(extent, 1))

    assert report.ok, str(report)
    assert "S(0), S(0) -> S(0)" in texts("aten.mul.Tensor", (extent, 3), (extent, 1), axis_size=3)


def test_pytorch_179502_a_view_across_a_split_dim_asks_for_boxing() -> None:
    """`x.view(16, 6)` of a (12, 8) split in dim 1 passed as a split of dim 0."""
    legal = texts("aten.view.default", (12, 8), [16, 6], axis_size=4)

    assert "S(0) -> S(0)" in legal
    assert not any(text.startswith("S(1)") for text in legal)


def test_oneflow_6292_partial_sums_box_to_a_split_beside_a_split() -> None:
    """(S(0), P) -> (S(0), S(0)) had no route."""
    mesh = Placement.grid((2, 2))
    source, target = NdSbp.parse("S(0), P"), NdSbp.parse("S(0), S(0)")

    way = route((8, 4), "float32", (mesh, source), (mesh, target))

    assert [step.kind.value for step in way.steps] == ["reduce-scatter"]


def test_oneflow_8920_a_cumulative_product_splits_its_other_dims() -> None:
    """`cumprod` had no signature but all B."""
    assert texts("aten.cumprod.default", (6, 4, 5), 1) == ["S(0) -> S(0)", "S(2) -> S(2)", "B -> B"]
    assert verify("aten.cumprod.default", torch.randn(5, 4, 3, dtype=torch.float64), 1).ok


def test_oneflow_9858_a_reshape_carries_two_axes_over_nested_dims() -> None:
    """[S(0), S(0)] -> [S(0), S(1)] follows from no 1-D signature."""
    call = abstract_call("aten.view.default", [(8, 4), [2, 4, 4]], {})

    found = {
        f"({one.inputs[0]}) -> ({one.outputs[0]})" for one in enumerate_signatures(call, (2, 2))
    }

    assert {"(S(0), S(0)) -> (S(0), S(1))", "(S(0), S(1)) -> (S(0), S(2))"} <= found
    assert "(S(0), S(0)) -> (S(0), S(0))" not in found


@pytest.mark.parametrize(("axis_size", "is_legal"), [(2, True), (4, True), (8, False)])
def test_libai_406_a_reshape_asks_the_axis_and_not_all_devices(
    axis_size: int, is_legal: bool
) -> None:
    """12 heads on 2 nodes of 4 devices: 8 does not divide 12, but each mesh axis does."""
    call = abstract_call("aten.view.default", [(64, 512, 2304), [64, 512, 12, 192]], {})

    assert ("S(2) -> S(2)" in map(str, derive(call, axis_size))) is is_legal
    nd = {f"{one.inputs[0]} -> {one.outputs[0]}" for one in enumerate_signatures(call, (4, 2))}
    assert {"S(0), S(2) -> S(0), S(2)", "S(2), S(0) -> S(2), S(0)"} <= nd
    assert "S(2), S(2) -> S(2), S(2)" not in nd


def test_parts_of_narrow_integers_are_not_widened() -> None:
    """Parts of an int8 sum may lie outside of int8, wrap, and come back; not so in int64."""
    narrow = torch.tensor([127, -128, 120, -120, 100], dtype=torch.int8)

    assert "P -> P" not in texts("aten.sum.default", narrow)
    assert "S(0) -> P" in texts("aten.sum.default", narrow)
    assert verify("aten.sum.default", narrow).ok


def test_arguments_by_name_mean_what_they_mean_by_position() -> None:
    """Rules read the arguments of mm in the order in which they were given."""
    by_name = texts("aten.mm.default", mat2=(6, 8), self=(4, 6))

    assert by_name == texts("aten.mm.default", (4, 6), (6, 8))
    assert verify("aten.mm.default", mat2=torch.randn(3, 5), self=torch.randn(4, 3)).ok


def test_a_value_boxed_for_backward_first_is_boxed_again_for_a_forward_node_after_it() -> None:
    """Both phases shared what the backward node had asked for, so that each waited for the other.

    Only graphs that list a forward node behind a backward one are laid out so.
    """
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.op("f", "relu.default", (Ref("x"),), (4, 4), pointwise=True)
    b.op("g", "mm.default", (Ref("x"), Ref("f")), (4, 4), phase=Phase.BACKWARD)
    b.op("h", "relu.default", (Ref("x"),), (4, 4), pointwise=True)
    outputs = (
        GraphOutput(name=name, kind=OutputKind.METRIC, value=name) for name in ("f", "g", "h")
    )
    graph = replace(b.graph(), outputs=tuple(outputs))
    split, whole = NdSbp.parse("S(0)"), NdSbp.parse("B")
    one = Signature(inputs=(split,), outputs=(split,))
    all_whole = Signature(inputs=(whole, whole), outputs=(whole,))
    strategy = Strategy(
        planner="hand",
        graph_hash=graph_hash(graph),
        stages=(Placement.grid((1,), ("data",)),),
        num_micro_batches=1,
        nodes={
            "f": Assignment(stage=0, signature=one),
            "g": Assignment(stage=0, signature=all_whole),
            "h": Assignment(stage=0, signature=Signature(inputs=(whole,), outputs=(whole,))),
        },
        storage={"x": Storage(stage=0, sbp=split)},
        in_flight=(1,),
    )

    plan = compile_plan(graph, strategy)

    assert check(plan).num_firings > 0
