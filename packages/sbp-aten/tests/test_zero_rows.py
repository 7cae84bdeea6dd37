"""What is proved of rows without a gradient holds when the operators are executed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_aten.passes.zero_rows import NOTHING, ZERO, RowFact, Sign, facts_of
from sbp_core.graph import LogicalGraph, Node, Ref, TensorType
from sbp_torch.ops.operators import bind, operator_of

_KIND = TensorType((4, 3), "float64")

#: Operators of two rows, of one row, and of three.
_TWO = ("add", "sub", "mul", "div")
_UNARY = ("abs", "neg", "sqrt", "rsqrt", "reciprocal", "sign", "sgn", "clone")
_THREE = ("addcmul", "addcdiv")

#: Numbers as second arguments.
_NUMBERS = st.sampled_from([-1.5, -0.0, 0.0, 1e-10, 0.5, 1, 1.0, 2, 3.0])


@st.composite
def programs(draw):
    """Return nodes on a gradient `g`, a parameter `p` and a state `s`, which is at least 0."""
    values, nodes = ["g", "p", "s"], []
    for index in range(draw(st.integers(1, 8))):
        one, two, three = (Ref(draw(st.sampled_from(values))) for _ in range(3))
        kind = draw(
            st.sampled_from(
                [
                    *_TWO,
                    *_UNARY,
                    *_THREE,
                    "pow",
                    "clamp_min",
                    "clamp",
                    "maximum",
                    "where",
                    "lerp",
                    "sum",
                    "mean",
                    "gt",
                ]
            )
        )
        kwargs, overload = {}, "default"
        args = (one,)
        if kind in _TWO:
            other = draw(_NUMBERS) if draw(st.booleans()) else two
            args, overload = (one, other), "Tensor"
            if kind in ("add", "sub") and draw(st.booleans()):
                kwargs["alpha"] = draw(_NUMBERS)
        elif kind in _THREE:
            args = (one, two, three)
            kwargs = {"value": draw(_NUMBERS)}
        elif kind in ("pow", "clamp_min"):
            args = (one, draw(_NUMBERS))
            overload = "Tensor_Scalar" if kind == "pow" else "default"
        elif kind == "clamp":
            args = (one, draw(_NUMBERS), draw(_NUMBERS))
        elif kind == "maximum":
            args = (one, two)
        elif kind == "lerp":
            args, overload = (one, two, 0.25), "Scalar"
        elif kind in ("sum", "mean"):
            # Only where every column is alike, so that shapes stay equal.
            args, overload = (one, (1,), True), "dim_IntList" if kind == "sum" else "dim"
        elif kind == "where":
            # A condition that follows from a row, or one that is not known.
            known = [n.outputs[0] for n in nodes if n.kind == "gt"]
            args, overload = (Ref(draw(st.sampled_from(["c", *known]))), one, two), "self"
        elif kind == "gt":
            args, overload = (one, draw(_NUMBERS)), "Scalar"
        name = f"v{index}"
        nodes.append(
            Node(
                name=name,
                op=f"aten.{kind}.{overload}",
                args=args,
                kwargs=kwargs,
                outputs=(name,),
                tags=("pointwise",),
            )
        )
        if kind != "gt":  # a truth value is only a condition
            values.append(name)
    return nodes


def _holds(fact: RowFact, value, inputs) -> None:
    # The premise of the proofs: a number that is none comes from other inputs than promised.
    value = torch.broadcast_to(value, (4, 3))
    number = ~value.isnan()
    if fact.zero:
        assert torch.equal(value, torch.zeros_like(value))
    if fact.same:
        assert torch.equal(value, inputs[fact.same])
    if fact.sign is Sign.AT_LEAST_ZERO:
        assert bool((value >= 0)[number].all())
    if fact.sign is Sign.ABOVE_ZERO:
        assert bool((value > 0)[number].all())


@given(programs())
@settings(max_examples=400)
def test_what_is_proved_is_so(nodes):
    torch.manual_seed(len(nodes))
    inputs = {
        "g": torch.zeros(4, 3, dtype=torch.float64),
        "p": torch.randn(4, 3, dtype=torch.float64),
        "s": torch.randn(4, 3, dtype=torch.float64).clamp(min=0),
        "c": torch.rand(4, 3) > 0.5,
    }
    facts = {"g": ZERO, "p": RowFact(same="p"), "s": RowFact(same="s"), "c": NOTHING}
    values = dict(inputs)
    types = dict.fromkeys(("g", "p", "s", *(node.name for node in nodes)), _KIND)
    for node in nodes:
        if node.kind in ("sum", "mean"):
            types[node.name] = TensorType((4, 1), "float64")
    graph = LogicalGraph(name="g", inputs=(), outputs=(), nodes=tuple(nodes), types=types)

    for node in nodes:
        (facts[node.name],) = facts_of(graph, node, facts.get)
        args = bind(node.args, values.__getitem__)
        made = operator_of(node.op)(*args, **node.kwargs)
        values[node.name] = made
        finite = bool(made.isfinite().all())
        if finite or facts[node.name] != NOTHING:
            _holds(facts[node.name], made, inputs)
        if not finite:
            return  # later facts are about finite numbers


def _fact(op, args, facts, kwargs=None, dtypes=None):
    node = Node(name="v", op=op, args=args, kwargs=kwargs or {}, outputs=("v",))
    types = {name: TensorType((4, 3), "float32") for name in ("g", "p", "s", "v")}
    types |= {name: TensorType((4, 3), dtype) for name, dtype in (dtypes or {}).items()}
    graph = LogicalGraph(name="g", inputs=(), outputs=(), nodes=(node,), types=types)
    return facts_of(graph, node, facts.get)[0]


_FACTS = {"g": ZERO, "p": RowFact(same="p"), "s": RowFact(same="s")}


def test_momentum_changes_rows_without_a_gradient():
    decayed = _fact("aten.mul.Tensor", (Ref("s"), 0.9), _FACTS)

    assert decayed == NOTHING


def test_a_number_that_rounds_to_zero_is_not_above_zero():
    root = {"r": RowFact(sign=Sign.AT_LEAST_ZERO)}
    made = [
        _fact("aten.add.Tensor", (Ref("r"), 1e-10), root, dtypes={"r": dtype, "v": dtype})
        for dtype in ("float32", "float16")
    ]

    assert [one.sign for one in made] == [Sign.ABOVE_ZERO, Sign.AT_LEAST_ZERO]


def test_a_wider_dtype_and_the_way_back_change_nothing_and_a_narrower_one_may():
    wide = _fact("aten._to_copy.default", (Ref("p"),), _FACTS, dtypes={"v": "float64"})
    narrow = _fact("aten._to_copy.default", (Ref("p"),), _FACTS, dtypes={"v": "bfloat16"})
    back = _fact("aten._to_copy.default", (Ref("w"),), {"w": wide}, dtypes={"w": "float64"})

    assert (wide.same, narrow.same, back.same) == ("p", "", "p")


@pytest.mark.parametrize(
    ("kind", "settings_", "same"),
    [
        ("fused_sgd", {"momentum": 0, "weight_decay": 0}, "p"),
        ("fused_sgd", {"momentum": 0, "weight_decay": 0.1}, ""),
        ("fused_sgd", {"momentum": 0.9, "weight_decay": 0}, ""),
        ("fused_adam", {"weight_decay": 0}, ""),
    ],
)
def test_fused_updates_are_known_by_their_settings(kind, settings_, same):
    found = _fact(f"sbp.{kind}.default", (Ref("p"), Ref("g"), (), 0.1), _FACTS, settings_)

    assert found.same == same


def test_arguments_by_name_that_change_an_operator_prove_nothing():
    facts = {"p": RowFact(same="p")}

    assert _fact("aten.div.Tensor", (Ref("p"), 1.0), facts).same == "p"
    rounded = _fact("aten.div.Tensor_mode", (Ref("p"), 1.0), facts, {"rounding_mode": "trunc"})
    assert rounded == NOTHING
