"""Sharding rules of pointwise operators: the notation is broadcasting, computed from the shapes.

ATen tags most pointwise operators; this module lists the ones that it does not tag. `effects` says
in which arguments they are linear or monotone. There are also operators that are pointwise except
for one dim, one output, or a lookup table.
"""

from __future__ import annotations

from sbp_aten.rules.effects import dependences
from sbp_aten.rules.formula import by_operator, notation
from sbp_core.signatures import (
    KEYWORD_ONLY,
    RANDOM_STAYS_WHOLE,
    Notation,
    OpCall,
    Rule,
    along,
    argument,
    broadcasting,
    labels,
    linear,
    tensor_position,
)


def notation_of(call: OpCall) -> Notation:
    """Return the notation of a pointwise call, with its linear and monotone arguments."""
    return broadcasting(call, *dependences(call))


#: The rule of every operator that ATen tags as pointwise.
POINTWISE = Rule(notation_of)


#: Pointwise operators that some ATen since 2.11 does not tag, with overload `default`.
_UNTAGGED = (
    "_conj _conj_copy _conj_physical _masked_scale _neg_view _neg_view_copy _prelu_kernel "
    "_prelu_kernel_backward _to_copy complex copy elu_backward "
    "fake_quantize_per_tensor_affine_cachemask floor_divide hardshrink_backward "
    "hardsigmoid_backward hardswish hardswish_backward hardtanh_backward leaky_relu "
    "leaky_relu_backward mish_backward polar rrelu_with_noise_backward softplus_backward "
    "softshrink_backward zero"
)


_HALVES = "one half of it gates the other"


def _as_real(call: OpCall) -> Notation:
    """`view_as_real` and back: `d* => d* pair!`, or the reverse."""
    both = (call.inputs[0], call.outputs[0])
    sides = ["d*" if entry.dtype.startswith("complex") else "d* pair!" for entry in both]
    work = "" if "_copy." in call.op else "; flop 0"
    why = "its two elements are one complex number"
    return notation(call, f"{' => '.join(sides)}; linear 0{work}; why {why}")


def _log_sigmoid(call: OpCall) -> Notation:
    """`d* => d*, d*`: increasing; on a CPU the second output is exp(-|x|), elsewhere it is empty.

    Backward: `d*, d*, d* => d*; linear 0`.
    """
    backward = "_backward" in call.op
    shape, buffer = call.inputs[0].shape, (call.inputs[2] if backward else call.outputs[1]).shape
    empty = len(buffer) != len(shape) or buffer == (0,)
    kept = "empty*!" if empty else "d*"
    if backward:
        return notation(call, f"d*, d*, {kept} => d*; linear 0")
    return notation(call, f"d* => d*, {kept}" + "; increasing 0 to 0" * empty)


def _rrelu(call: OpCall) -> Notation:
    """Data, noise => result, noise: draws numbers in training, else a leaky relu."""
    slopes = (argument(call, 2, "lower", 0.125), argument(call, 3, "upper", 1 / 3))
    outputs = ", ".join("d*" for _ in call.outputs)
    if argument(call, 4, "training", False):
        return notation(call, f"d*!, d* => {outputs}; why {RANDOM_STAYS_WHOLE}")
    grows = "; increasing 0 to 0" * (min(slopes) >= 0)
    passes = "; linear 1 to 1; increasing 1 to 1" * (len(call.outputs) > 1)
    return notation(call, f"d*, d* => {outputs}{grows}{passes}")


def _is_in(call: OpCall) -> Notation:
    """An element is found if it is in any part of the tests; inverted: in no part."""
    kind = "min" if argument(call, KEYWORD_ONLY, "invert", False) else "max"
    formula = "d*, t* => d*" if len(call.inputs) > 1 else "t* => ()"
    return notation(call, f"{formula}; reduce t* {kind}")


def _count_below(call: OpCall) -> Notation:
    """`searchsorted`, `bucketize`: `d0 k, d0 m => d0 m`, or `k, d0 m => d0 m`.

    The result is the number of boundaries below a value, so results for parts of them add up.
    """
    bounds = 1 if call.op.startswith("aten.bucketize.Tensor") else 0
    by_order = tensor_position(call, KEYWORD_ONLY, "sorter") is not None
    num_before = len(call.inputs[bounds].shape) - 1
    inner = " ".join([*labels("d", num_before), "k!" if by_order else "k"])
    values = len(call.inputs) - 1 - by_order
    inputs = ["d*"] * values
    inputs.insert(bounds, inner)
    left = ", ".join([*inputs, *[inner] * by_order])
    clause = f"; increasing {1 - bounds}" * (values > 0)
    return notation(
        call,
        f"{left} => d*{clause}; why the order is one of places in it",
        d=len(call.outputs[0].shape),
    )


RULES = by_operator(
    {
        _UNTAGGED: POINTWISE,
        "_add_relu.Scalar _add_relu.Tensor fill.Scalar fill.Tensor floor_divide.Scalar": POINTWISE,
        "isin.Tensor_Scalar masked_fill.Tensor rsub.Tensor": POINTWISE,
        "where.Scalar where.ScalarOther where.ScalarSelf": POINTWISE,
        "bucketize.Scalar bucketize.Tensor": Rule(_count_below),
        "glu": along(1, default=-1, why=_HALVES),
        "glu_backward": along(2, "dim", linear(0), why=_HALVES),
        "glu_jvp": along(3, "dim", linear(2), why=_HALVES),
        "isin.Scalar_Tensor isin.Tensor_Tensor": Rule(_is_in),
        "log_sigmoid_backward log_sigmoid_forward": Rule(_log_sigmoid),
        "rrelu_with_noise rrelu_with_noise_functional": Rule(_rrelu),
        "searchsorted.Scalar searchsorted.Tensor": Rule(_count_below),
        "view_as_complex view_as_complex_copy view_as_real view_as_real_copy": Rule(_as_real),
    }
)
