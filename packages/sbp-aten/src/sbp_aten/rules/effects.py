"""Table of the arguments in which pointwise operators are linear or monotone.

`pointwise` uses it: partial sums (or maxima, minima) pass through an operator that is linear (or
monotone). A clause is like in the notation, but its numbers are positions among all arguments:
`linear 0 1` for `add(x, y)`. It holds if all of them are tensors, of any shape, also with 0 dims.
In a linear set the number 0 is allowed as well, because it is a sum of zeros. Numbers known only on
the host have no sign.

Monotone means: on all reals, because the parts of a `P(max)` lie anywhere below the maximum. If an
operator is not defined below some number (`sqrt`, `log`), only `P(min)` passes. NaN is not part of
the order. Nothing is claimed if integers of few bits would wrap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

from sbp_core.graph import ITEMSIZE
from sbp_core.signatures import Dependence, Effect, OpCall, argument, tensor_position

_UPPER = "increasing 0; increasing 1; max 0 1"
_LOWER = "increasing 0; increasing 1; min 0 1"

#: Clauses -> operators of ATen, without overloads.
_CLAUSES = {
    "linear 0": (
        "__lshift__ _masked_scale _prelu_kernel_backward bitwise_left_shift gelu_backward "
        "hardswish_backward mish_backward polar sigmoid_backward silu_backward tanh_backward"
    ),
    # The conjugate of a real number is the number itself.
    "linear 0; increasing 0": (
        "_conj _conj_copy _conj_physical clone conj_physical deg2rad hardshrink_backward "
        "hardsigmoid_backward hardtanh_backward ldexp logit_backward positive rad2deg "
        "softplus_backward softshrink_backward threshold_backward"
    ),
    "linear 0; decreasing 0": "_neg_view _neg_view_copy",
    "linear 0 1": "complex",
    "linear 0 1; linear 0 2; increasing 0": "addcmul",
    "linear 0 1; increasing 0": "addcdiv",
    "linear 1; linear 0 1; increasing 1; unread 0": "copy fill",
    "linear 0; unread 0": "zero",
    "linear 0 2; increasing 0 2; increasing 0; increasing 2": "masked_fill",
    "increasing 0": (
        "__rshift__ asinh atan bitwise_right_shift celu erf exp exp2 expm1 hardshrink hardsigmoid "
        "hardtanh relu relu6 selu sgn sigmoid sign sinh softshrink special_i1 special_log_ndtr "
        "special_modified_bessel_i1 tanh"
    ),
    "decreasing 0": "angle bitwise_not erfc signbit special_erfcx",
    "increasing 0; increasing 1": "_add_relu logaddexp logaddexp2 nextafter",
    "increasing 1": "copysign heaviside",
    "increasing 0; decreasing 1": "ge gt",
    "decreasing 0; increasing 1": "le lt",
    _UPPER: "clamp_min fmax max maximum",
    _LOWER: "clamp_max fmin min minimum",
    "increasing 0; increasing 1; increasing 2; max 0 1; min 0 2; min 1 2": "clamp clip",
    # The slope applies to negative numbers.
    "decreasing 1": "_prelu_kernel",
    "min 0": "acosh",
    "min 1": "igamma",
    "falls 0": (
        "special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0 "
        "special_scaled_modified_bessel_k1"
    ),
}

#: Unsigned numbers: `bool` counts as 0 and 1.
_UNSIGNED = ("bool", "uint8", "uint16", "uint32", "uint64")

#: Prefixes of the dtypes with fractions.
_INEXACT = ("float", "bfloat", "complex")

#: Integers that wrap around after few additions.
_NARROW = ("int8", "int16", *_UNSIGNED[1:])


def _sign(value: object) -> int | None:
    """Return 1, 0 or -1 for a finite number; None for anything else."""
    if not isinstance(value, int | float) or not isfinite(value):
        return None
    return (value > 0) - (value < 0)


def _direction(index: int, sign: int | None) -> str:
    """Return the clause for an argument that is multiplied by a number of that sign."""
    if sign is None:
        return ""
    return f"; {'decreasing' if sign < 0 else 'increasing'} {index}"


def _all_unsigned(call: OpCall) -> bool:
    return all(entry.dtype in _UNSIGNED for entry in call.inputs)


def _is_exact(call: OpCall) -> bool:
    """Whether the argument holds integers or bools."""
    return not call.inputs[0].dtype.startswith(_INEXACT)


def _all_bool(call: OpCall) -> bool:
    return all(entry.dtype == "bool" for entry in call.inputs)


def _wraps(call: OpCall) -> bool:
    return call.outputs[0].dtype in _NARROW


def _on_exact(exact: str, otherwise: str) -> Callable[[OpCall], str]:
    """Return the clauses of an operator with a special case for integers."""
    return lambda call: exact if _is_exact(call) else otherwise


def _on_unsigned(unsigned: str, otherwise: str) -> Callable[[OpCall], str]:
    """Return the clauses of an operator that is monotone only for unsigned numbers."""
    return lambda call: unsigned if _all_unsigned(call) else otherwise


def _sum(call: OpCall) -> str:
    """`add`, `sub`, `rsub`: x + alpha y, x - alpha y, y - alpha x. Of bools, `add` is "or"."""
    if _wraps(call):
        return "linear 0 1"
    kind, sign = call.op.split(".")[1], _sign(argument(call, 2, "alpha", 1))
    turned = -sign if kind != "add" and sign is not None else sign
    both = ["; increasing 0", _direction(1, turned)]
    if kind == "rsub":
        both = [_direction(0, turned), "; increasing 1"]
    return "linear 0 1" + "".join(both) + "; max 0 1" * (_all_bool(call) and kind != "rsub")


def _product(call: OpCall) -> str:
    """`mul`: monotone with a factor of known sign. Of bools it is "and"."""
    clauses = "linear 0; linear 1"
    if _wraps(call):
        return clauses
    if len(call.inputs) == 2:
        for index, other in ((0, 1), (1, 0)):
            if call.inputs[other].dtype in _UNSIGNED:
                clauses += f"; increasing {index}"
        return f"{clauses}; min 0 1" if _all_bool(call) else clauses
    factor = argument(call, 1, "other")
    # Infinity times parts of both signs is not infinity in sum.
    infinite = isinstance(factor, float) and not isfinite(factor)
    return "" if infinite else clauses + _direction(0, _sign(factor))


def _quotient(call: OpCall) -> str:
    """`div` and `floor_divide`: linear unless rounded, monotone if the divisor is a number."""
    rounded = "floor" in call.op or argument(call, 2, "rounding_mode") is not None
    divisor = argument(call, 1, "other")
    sign = _sign(divisor)
    # Parts divided by zero are infinities of both signs.
    sums = not rounded and sign != 0
    return ("linear 0" if sums else "") + (_direction(0, sign) if sign else "")


def _interpolation(call: OpCall) -> str:
    """`lerp`: (1 - w) x + w y."""
    weight = argument(call, 2, "weight")
    if _sign(weight) is None:
        return "linear 0 1"
    return f"linear 0 1{_direction(0, _sign(1 - weight))}{_direction(1, _sign(weight))}"


def _power(call: OpCall) -> str:
    """`pow` of or to a number: odd powers are monotone, fractional ones undefined below zero."""
    if call.op == "aten.pow.Scalar":
        base = argument(call, 0, "self")
        if _is_exact(call) or _sign(base) != 1:
            return ""
        return "decreasing 1" if base < 1 else "increasing 1"
    exponent = argument(call, 1, "exponent")
    if _sign(exponent) == -1 and exponent % 1 and not _is_exact(call):
        return "falls 0"
    if _sign(exponent) != 1 or _wraps(call):
        return ""
    if exponent == 1:
        return "linear 0; increasing 0"
    if exponent % 2 == 1 or _all_unsigned(call):
        return "increasing 0"
    return "" if exponent % 2 == 0 else "min 0"


def _logic(call: OpCall) -> str:
    """Return the clauses of "or" and "and", which are max and min of bools."""
    fits = _all_bool if "bitwise" in call.op else _all_unsigned
    return "" if not fits(call) else _UPPER if "or" in call.op.split(".")[1] else _LOWER


def _choice(call: OpCall) -> str:
    """`where`: between two numbers, monotone in the condition."""
    if call.op != "aten.where.Scalar":
        return "linear 1 2; increasing 1 2; increasing 1; increasing 2"
    yes, no = argument(call, 1, "self"), argument(call, 2, "other")
    if _sign(yes) is None or _sign(no) is None:
        return ""
    return "increasing 0" if yes >= no else "decreasing 0"


def _conversion(call: OpCall) -> str:
    """`_to_copy`: monotone unless numbers wrap, or become bools (comparison with zero)."""
    before, after = call.inputs[0].dtype, call.outputs[0].dtype
    room = ITEMSIZE.get(after, 0) - ITEMSIZE.get(before, 0)
    if before == "bool" or after.startswith(_INEXACT):
        fits = True
    elif after == "bool":
        fits = before in _UNSIGNED
    elif before.startswith("int"):
        fits = after.startswith("int") and room >= 0
    elif before.startswith("uint"):
        fits = room >= (1 if after.startswith("int") else 0)
    else:
        fits = after in ("int32", "int64")
    return "linear 0; increasing 0" if fits else "linear 0"


def _exponential_unit(call: OpCall) -> str:
    """`elu` and its backward operator: increasing if no coefficient is negative."""
    backward = call.op.startswith("aten.elu_backward.")
    names = ("alpha", "scale", "input_scale")
    signs = [_sign(argument(call, at, name, 1)) for at, name in enumerate(names, 1)]
    by_result = backward and argument(call, 4, "is_result")
    grows = not by_result and all(sign in (0, 1) for sign in signs)
    return ("linear 0" if backward else "") + ("; increasing 0" if grows else "")


def _scaled(index: int, name: str, default: object = None) -> Callable[[OpCall], str]:
    """Return the clauses of an operator with slopes 1, 0 and the number at `index`."""

    def clauses(call: OpCall) -> str:
        linear = "linear 0" if "_backward" in call.op else ""
        grows = _sign(argument(call, index, name, default)) in (0, 1)
        return linear + ("; increasing 0" if grows else "")

    return clauses


def _threshold(call: OpCall) -> str:
    """`threshold(x, t, v)`: x above t, else v."""
    bound, value = argument(call, 1, "threshold"), argument(call, 2, "value")
    known = _sign(bound) is not None and _sign(value) is not None
    return "increasing 0" if known and value <= bound else ""


def _softplus(call: OpCall) -> str:
    """`softplus(x, beta, threshold)`: drops by exp(-threshold) where it becomes x."""
    steep = _sign(argument(call, 1, "beta", 1)) == 1
    smooth = argument(call, 2, "threshold", 20)
    return "increasing 0" if steep and _sign(smooth) == 1 and smooth >= 20 else ""


def _logit(call: OpCall) -> str:
    """`logit(x, eps)`: defined between 0 and 1; with `eps` the argument is clamped to that."""
    return "increasing 0" if _sign(argument(call, 1, "eps")) in (0, 1) else ""


def _randomised_gradient(call: OpCall) -> str:
    """`rrelu_with_noise_backward(g, x, noise, ...)`: g noise in training, else as `leaky_relu`."""
    names = enumerate(("lower", "upper", "training"), 3)
    lower, upper, trains = (argument(call, at, name) for at, name in names)
    if _sign(lower) is None or _sign(upper) is None:
        return "linear 0"
    if trains and upper - lower > 1e-6:
        return "linear 0; linear 2; ignored 1"
    return "linear 0; ignored 2" + ("; increasing 0" if lower + upper >= 0 else "")


def _cleaned(call: OpCall) -> str:
    """`nan_to_num`: by default infinities become the largest numbers, so it is monotone."""
    given = (argument(call, 2, "posinf"), argument(call, 3, "neginf"))
    return "increasing 0" if given == (None, None) else ""


_BY_CALL: dict[str, Callable[[OpCall], str]] = {
    **dict.fromkeys(("add", "rsub", "sub"), _sum),
    **dict.fromkeys(("div", "floor_divide", "true_divide"), _quotient),
    **dict.fromkeys(("elu", "elu_backward"), _exponential_unit),
    **dict.fromkeys(("bitwise_or", "__or__", "logical_or"), _logic),
    **dict.fromkeys(("bitwise_and", "__and__", "logical_and"), _logic),
    # Operators that are increasing from zero on and undefined below.
    **dict.fromkeys(
        ("log", "log10", "log1p", "log2", "sqrt"), _on_unsigned("increasing 0", "min 0")
    ),
    # Operators that are decreasing from zero on, so for unsigned numbers only.
    **dict.fromkeys(("logical_not", "reciprocal"), _on_unsigned("decreasing 0", "")),
    "rsqrt": _on_unsigned("decreasing 0", "falls 0"),
    # Operators that do not change integers.
    **dict.fromkeys(
        ("ceil", "floor", "round", "trunc"), _on_exact("linear 0; increasing 0", "increasing 0")
    ),
    "isinf": _on_exact("unread 0", ""),
    "isnan": _on_exact("unread 0", ""),
    "isneginf": _on_exact("unread 0", "decreasing 0"),
    "isposinf": _on_exact("unread 0", "increasing 0"),
    "_to_copy": _conversion,
    "leaky_relu": _scaled(1, "negative_slope", 0.01),
    "leaky_relu_backward": _scaled(2, "negative_slope"),
    "lerp": _interpolation,
    "logit": _logit,
    "mul": _product,
    "nan_to_num": _cleaned,
    "native_dropout_backward": _scaled(2, "scale"),
    "neg": lambda call: "linear 0" if _wraps(call) else "linear 0; decreasing 0",
    "pow": _power,
    "rrelu_with_noise_backward": _randomised_gradient,
    "softplus": _softplus,
    "threshold": _threshold,
    "where": _choice,
}

_ALWAYS = {name: clauses for clauses, names in _CLAUSES.items() for name in names.split()}


def dependences(call: OpCall) -> tuple[Dependence, ...]:
    """Return the linear and monotone dependences of a pointwise call, by tensor positions."""
    namespace, name = call.op.split(".")[:2]
    if namespace != "aten":
        return ()
    by_call = _BY_CALL.get(name)
    text = by_call(call) if by_call else _ALWAYS.get(name, "")
    found = (_dependence(call, clause.split()) for clause in text.split(";") if clause.strip())
    return tuple(dependence for dependence in found if dependence is not None)


def _dependence(call: OpCall, words: list[str]) -> Dependence | None:
    """Return the dependence that a clause states for this call; None if it does not apply."""
    effect = Effect(words[0])
    inputs = []
    for index in map(int, words[1:]):
        position = tensor_position(call, index, "")
        if position is not None:
            inputs.append(position)
        elif effect is not Effect.LINEAR or _sign(argument(call, index, "")) != 0:
            return None
    return Dependence(effect=effect, inputs=tuple(inputs))
