from __future__ import annotations

import pytest
import torch

from sbp_aten.passes import drop_identities
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Ref, Symbol, TensorType
from sbp_core.testing.graphs import Builder
from sbp_torch.runtime.single import run_graph

X, SHAPE = Ref("x"), (2, 3)
Call = tuple[str, tuple[object, ...], dict[str, object], TensorType]


def _type(shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> TensorType:
    return TensorType(shape, dtype)


def _to(dtype: str) -> dict[str, object]:
    return {"dtype": Symbol("dtype", dtype)}


def _chain(*calls: Call, dtype: str = "float32", shape: tuple[int, ...] = SHAPE) -> LogicalGraph:
    """Return a graph of calls, each on what the one before made; `X` is the last value."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, shape, dtype=dtype)
    last = "x"
    for index, (op, args, kwargs, made) in enumerate(calls):
        name = f"v{index}"
        b.op(name, op, tuple(Ref(last) if part is X else part for part in args), made.shape)
        b.nodes[-1].kwargs.update(kwargs)  # type: ignore[attr-defined]  # a dict, as built
        b.types[name] = made
        last = name
    b.outputs.append(GraphOutput(name="out", kind=OutputKind.METRIC, value=last))
    return verify_graph(b.graph())


def _neg(made: TensorType) -> Call:
    return ("neg.default", (X,), {}, made)


#: Chains that come to nothing.
NOTHING: dict[str, tuple[Call, ...]] = {
    "times one": (("mul.Tensor", (X, 1), {}, _type()),),
    "times 1.0": (("mul.Scalar", (X, 1.0), {}, _type()),),
    "divided by one": (("div.Tensor", (X, 1), {}, _type()),),
    "to the power of one": (("pow.Tensor_Scalar", (X, 1), {}, _type()),),
    "minus zero": (("sub.Tensor", (X, 0), {}, _type()),),
    "alias": (("alias.default", (X,), {}, _type()),),
    "detach": (("detach.default", (X,), {}, _type()),),
    "clone": (("clone.default", (X,), {}, _type()),),
    "expand to what it is": (("expand.default", (X, (2, -1)), {}, _type()),),
    "to the same dtype": (("_to_copy.default", (X,), _to("float32"), _type()),),
    "wider and back": (
        ("_to_copy.default", (X,), _to("float64"), _type(dtype="float64")),
        ("_to_copy.default", (X,), _to("float32"), _type()),
    ),
    "minus minus": (_neg(_type()), _neg(_type())),
    "transposed twice": (
        ("transpose.int", (X, 0, -1), {}, _type((3, 2))),
        ("transpose.int", (X, 1, 0), {}, _type()),
    ),
    "permuted back": (
        ("permute.default", (X, (1, 0)), {}, _type((3, 2))),
        ("permute.default", (X, (-1, 0)), {}, _type()),
    ),
    "permuted by nothing": (("permute.default", (X, (0, 1)), {}, _type()),),
    "unsqueezed and squeezed": (
        ("unsqueeze.default", (X, 1), {}, _type((2, 1, 3))),
        ("squeeze.dim", (X, -2), {}, _type()),
    ),
    "all of a dim": (("slice.Tensor", (X, 1, 0, 9223372036854775807), {}, _type()),),
}

#: Chains that do something, for all that they look like those above.
SOMETHING: dict[str, tuple[Call, ...]] = {
    "plus zero": (("add.Tensor", (X, 0.0), {}, _type()),),
    "minus negative zero": (("sub.Tensor", (X, -0.0), {}, _type()),),
    "scaled zero": (("sub.Tensor", (X, 0), {"alpha": 2}, _type()),),
    "to integers": (("div.Tensor_mode", (X, 1), {"rounding_mode": "floor"}, _type()),),
    "narrower and back": (
        ("_to_copy.default", (X,), _to("bfloat16"), _type(dtype="bfloat16")),
        ("_to_copy.default", (X,), _to("float32"), _type()),
    ),
    "made dense": (
        ("clone.default", (X,), {"memory_format": Symbol("memory_format", "contiguous_format")},
         _type()),
    ),
    "permuted twice": (
        ("permute.default", (X, (1, 2, 0)), {}, _type((2, 2, 2))),
        ("permute.default", (X, (1, 2, 0)), {}, _type((2, 2, 2))),
    ),
    "other dims": (
        ("transpose.int", (X, 0, 1), {}, _type((2, 2, 2))),
        ("transpose.int", (X, 1, 2), {}, _type((2, 2, 2))),
    ),
}  # fmt: skip


def _run(graph: LogicalGraph) -> torch.Tensor:
    kind = graph.tensor("x")
    values = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -1.5, 3e-39, 1 / 3, 7.0])
    count = torch.Size(kind.shape).numel()
    x = values[:count].view(kind.shape).to(getattr(torch, kind.dtype))
    return run_graph(graph, {}, [{"x": x}], {})[0]["out"]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit; of what is not a number only where it is."""
    if not torch.equal(one.isnan(), other.isnan()):
        return False
    bits = [value.where(~value.isnan(), 0).contiguous().view(torch.uint8) for value in (one, other)]
    return torch.equal(*bits)


@pytest.mark.parametrize("name", NOTHING)
def test_what_comes_to_nothing_goes(name: str) -> None:
    graph = _chain(*NOTHING[name])

    made = verify_graph(drop_identities(graph))

    assert made.nodes == ()
    assert _same_bits(_run(made), _run(graph))


@pytest.mark.parametrize("name", SOMETHING)
def test_what_changes_bits_or_strides_stays(name: str) -> None:
    cube = (2, 2, 2) if "permuted" in name or "dims" in name else SHAPE
    graph = _chain(*SOMETHING[name], shape=cube)

    made = verify_graph(drop_identities(graph))

    assert made.nodes == graph.nodes


def test_zero_may_be_added_to_integers() -> None:
    graph = _chain(("add.Tensor", (X, 0), {}, _type(dtype="int64")), dtype="int64")

    assert drop_identities(graph).nodes == ()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_conversion_by_way_of_a_wider_dtype_goes_there_at_once(dtype: str) -> None:
    graph = _chain(
        ("_to_copy.default", (X,), _to("float64"), _type(dtype="float64")),
        ("_to_copy.default", (X,), _to(dtype), _type(dtype=dtype)),
    )

    made = verify_graph(drop_identities(graph))

    assert [node.args for node in made.nodes] == [(X,)]
    assert _same_bits(_run(made), _run(graph))


def test_a_copy_that_makes_a_value_dense_stays() -> None:
    expanded = ("expand.default", (X, (2, 3)), {}, _type())
    copied = ("clone.default", (X,), {}, _type())
    shown = ("view.default", (X, (6,)), {}, _type((6,)))
    graph = _chain(expanded, copied, copied, shown, shape=(2, 1))

    made = verify_graph(drop_identities(graph))

    assert [node.kind for node in made.nodes] == ["expand", "clone", "view"]
    assert _same_bits(_run(made), _run(graph))


def test_sums_add_in_the_order_that_they_added_in() -> None:
    part = ("slice.Tensor", (X, 1, 0, 2), {}, _type((2, 2)))
    once = ("mul.Tensor", (X, 1), {}, _type((2, 2)))
    graph = _chain(part, once, ("sum.default", (X,), {}, _type(())))

    # The product is dense, the part is not: a sum over it may go another way.
    assert drop_identities(graph).nodes == graph.nodes
