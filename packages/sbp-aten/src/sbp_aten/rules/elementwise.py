"""Operators that are elementwise but for one dim, one output, or a table they look things up in."""

from __future__ import annotations

from sbp_core.signatures import (
    KEYWORD_ONLY,
    RANDOM_STAYS_WHOLE,
    Dims,
    Notation,
    OpCall,
    Rule,
    along,
    argument,
    fresh_dims,
    increasing,
    linear,
    tensor_position,
)

_HALVES = "one half of it gates the other"
_PAIR = "its two elements are one complex number"


def _as_real(call: OpCall) -> Notation:
    """`view_as_real` and back: `d0 d1 => d0 d1 pair!`, or the reverse."""
    sides = []
    for entry in (call.inputs[0], call.outputs[0]):
        paired = not entry.dtype.startswith("complex")
        dims = fresh_dims(len(entry.shape) - paired)
        sides.append((*dims, ("pair",)) if paired else dims)
    return Notation(
        inputs=(sides[0],),
        outputs=(sides[1],),
        dependences=(linear(0),),
        whole=frozenset(["pair"]),
        work_flop=None if "_copy." in call.op else 0.0,
        why=_PAIR,
    )


def _with_buffer(shape: tuple[int, ...], dims: Dims) -> Dims:
    """Return the dims of the buffer of `log_sigmoid`: those of the data, or of an empty tensor."""
    return dims if len(shape) == len(dims) and shape != (0,) else fresh_dims(len(shape), "empty")


def _log_sigmoid(call: OpCall) -> Notation:
    """`d0 d1 => d0 d1, d0 d1`: increasing; on a CPU the second output is exp(-|x|)."""
    dims = fresh_dims(len(call.inputs[0].shape))
    buffer = _with_buffer(call.outputs[1].shape, dims)
    empty = buffer != dims
    return Notation(
        inputs=(dims,),
        outputs=(dims, buffer),
        dependences=(increasing(0, outputs=(0,)),) if empty else (),
        whole=frozenset(name for (name,) in buffer) if empty else frozenset(),
    )


def _log_sigmoid_backward(call: OpCall) -> Notation:
    dims = fresh_dims(len(call.outputs[0].shape))
    buffer = _with_buffer(call.inputs[2].shape, dims)
    return Notation(
        inputs=(dims, dims, buffer),
        outputs=(dims,),
        dependences=(linear(0),),
        whole=frozenset(name for (name,) in buffer) if buffer != dims else frozenset(),
    )


def _rrelu(call: OpCall) -> Notation:
    """Data, noise => result, noise: it draws numbers in training, else it is a leaky relu."""
    dims = fresh_dims(len(call.inputs[0].shape))
    draws = bool(argument(call, 4, "training", False))
    slopes = (argument(call, 2, "lower", 0.125), argument(call, 3, "upper", 1 / 3))
    passes = (linear(1, outputs=(1,)), increasing(1, outputs=(1,))) if len(call.outputs) > 1 else ()
    grows = (increasing(0, outputs=(0,)),) if not draws and min(slopes) >= 0 else ()
    return Notation(
        inputs=(dims, dims),
        outputs=(dims,) * len(call.outputs),
        dependences=(*grows, *(passes if not draws else ())),
        whole=frozenset(name for (name,) in dims) if draws else frozenset(),
        why=RANDOM_STAYS_WHOLE if draws else "",
    )


def _is_in(call: OpCall) -> Notation:
    """`d0, t0 => d0; reduce t0 max`: in any part of the tests; if inverted, in no part (min)."""
    elements = [fresh_dims(len(entry.shape)) for entry in call.inputs[:-1]]
    tests = fresh_dims(len(call.inputs[-1].shape), "t")
    reduction = "min" if argument(call, KEYWORD_ONLY, "invert", False) else "max"
    return Notation(
        inputs=(*elements, tests),
        outputs=(elements[0] if elements else (),),
        reductions=tuple((name, reduction) for (name,) in tests),
    )


def _count_below(call: OpCall) -> Notation:
    """`searchsorted`, `bucketize`: `d0 k, d0 m => d0 m`, or `k, d0 m => d0 m`.

    What is found is the number of boundaries below a value, so that parts of them add up.
    """
    bounds = 1 if call.op.startswith("aten.bucketize.Tensor") else 0
    shape = call.inputs[bounds].shape
    made = fresh_dims(len(call.outputs[0].shape))
    inner = (*made[: len(shape) - 1], ("k",))
    by_order = tensor_position(call, KEYWORD_ONLY, "sorter") is not None
    values = len(call.inputs) - 1 - by_order
    inputs: list[Dims] = [made] * values
    inputs.insert(bounds, inner)
    return Notation(
        inputs=(*inputs, *([inner] if by_order else [])),
        outputs=(made,),
        dependences=(increasing(1 - bounds),) if values else (),
        whole=frozenset("k") if by_order else frozenset(),
        why="the order is one of places in it" if by_order else "",
    )


_COUNT_BELOW = Rule(_count_below)
_AS_REAL = Rule(_as_real)

RULES = {
    "aten.bucketize.Scalar": _COUNT_BELOW,
    "aten.bucketize.Tensor": _COUNT_BELOW,
    "aten.glu.default": along(1, default=-1, why=_HALVES),
    "aten.glu_backward.default": along(2, "dim", linear(0), why=_HALVES),
    "aten.glu_jvp.default": along(3, "dim", linear(2), why=_HALVES),
    "aten.isin.Scalar_Tensor": Rule(_is_in),
    "aten.isin.Tensor_Tensor": Rule(_is_in),
    "aten.log_sigmoid_backward.default": Rule(_log_sigmoid_backward),
    "aten.log_sigmoid_forward.default": Rule(_log_sigmoid),
    "aten.rrelu_with_noise.default": Rule(_rrelu),
    "aten.rrelu_with_noise_functional.default": Rule(_rrelu),
    "aten.searchsorted.Scalar": _COUNT_BELOW,
    "aten.searchsorted.Tensor": _COUNT_BELOW,
    "aten.view_as_complex.default": _AS_REAL,
    "aten.view_as_complex_copy.default": _AS_REAL,
    "aten.view_as_real.default": _AS_REAL,
    "aten.view_as_real_copy.default": _AS_REAL,
}
