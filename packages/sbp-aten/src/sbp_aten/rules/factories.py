"""Operators that make tensors out of sizes and numbers; on a shard, of its own size.

Where the numbers of a shard would be rounded otherwise (`linspace`), it is cut out of the whole.
"""

from __future__ import annotations

from dataclasses import replace

from sbp_core.graph import Argument, Symbol
from sbp_core.signatures import (
    Dependence,
    LocalCall,
    Localizer,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    fresh_dims,
    linear,
    run_as_is,
    unread,
    with_local_shape,
)


def made(call: OpCall, *dependences: Dependence) -> Notation:
    """Return `=> d0 d1`: tensor arguments, if there are any, only hand over numbers or a dtype.

    Their labels are x0_0, x0_1, ...; what they index does not matter to the output.
    """
    inputs = tuple(fresh_dims(len(entry.shape), f"x{at}_") for at, entry in enumerate(call.inputs))
    return Notation(
        inputs=inputs,
        outputs=(fresh_dims(len(call.outputs[0].shape)),),
        dependences=dependences,
        reductions=tuple((name, "none") for dims in inputs for (name,) in dims),
    )


def _of_size(*dependences: Dependence) -> Rule:
    """Return the rule of `zeros(size, ...)` and alike."""
    return Rule(lambda call: made(call, *dependences), with_local_shape(0))


def _new(*dependences: Dependence) -> Rule:
    """Return the rule of `x.new_ones(size, ...)` and alike, which take only the dtype from `x`."""
    return Rule(lambda call: made(call, unread(0), *dependences), with_local_shape(1))


def _like(*dependences: Dependence) -> Rule:
    """Return the rule of `ones_like(x, ...)` and alike: `d0 d1 => d0 d1; unread 0`."""

    def meaning(call: OpCall) -> Notation:
        dims = fresh_dims(len(call.outputs[0].shape))
        return Notation(inputs=(dims,), outputs=(dims,), dependences=(unread(0), *dependences))

    return Rule(meaning)


def _filled(index: int, rule: Rule) -> Rule:
    """Return the rule of an operator that fills in the number at `index`; 0 is a sum of zeros."""

    def meaning(call: OpCall) -> Notation:
        notation = rule.notation(call)
        value = argument(call, index, "fill_value" if index else "s")
        if not isinstance(value, int | float) or value != 0:
            return notation
        sums = (linear(), *([linear(0)] if call.inputs else []))
        return replace(notation, dependences=(*notation.dependences, *sums))

    return Rule(meaning, rule.localize)


def _cut_out(call: OpCall, shards: Shards) -> LocalProgram:
    """Make all of it, and cut the shard out: `slice(slice(linspace(...), 0, ...), 1, ...)`."""
    builder = LocalProgramBuilder()
    value = builder(call.op, *call.args, **call.kwargs)
    for dim, ((start, stop), extent) in enumerate(
        zip(shards.outputs[0], call.outputs[0].shape, strict=True)
    ):
        if stop - start != extent:
            value = builder("aten.slice.Tensor", value, dim, start, stop)
    return builder.program(value)


#: An operator whose values depend on all sizes, so that every rank makes all of them.
_CUT_OUT = Rule(made, _cut_out)


def _strided(index: int) -> Localizer:
    """Return the localiser for sizes at `index` and strides behind: dense, in the same order."""

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        shape = shards.output_shape()
        strides = [0] * len(shape)
        step = 1
        for dim in sorted(range(len(shape)), key=lambda at: (call.args[index + 1][at], -at)):
            strides[dim] = step
            step *= max(shape[dim], 1)
        args = (*call.args[:index], shape, tuple(strides), *call.args[index + 2 :])
        return LocalCall(op=call.op, args=args, kwargs=call.kwargs)

    return localize


def _range(call: OpCall) -> tuple[object, object, object]:
    """Return start, end and step of an `arange` of any overload."""
    if call.op == "aten.arange.default":
        return 0, argument(call, 0, "end"), 1
    step = argument(call, 2, "step", 1) if call.op.endswith("start_step") else 1
    return argument(call, 0, "start"), argument(call, 1, "end"), step


def _arange_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Start where the shard starts; a range of reals would be rounded otherwise there."""
    start, end, step = _range(call)
    ((first, last),) = shards.outputs[0]
    if last - first == call.outputs[0].shape[0]:
        return run_as_is(call)
    if not (isinstance(start, int) and isinstance(end, int) and isinstance(step, int)):
        return _cut_out(call, shards)
    named = {"start", "end", "step"}
    return LocalCall(
        op="aten.arange.start_step",
        args=(start + first * step, start + last * step, step),
        kwargs={key: value for key, value in call.kwargs.items() if key not in named},
    )


def _eye_shard(call: OpCall, shards: Shards) -> LocalProgram:
    """Compare the global numbers of rows and columns."""
    builder = LocalProgramBuilder()
    place: dict[str, Argument] = {
        key: value for key, value in call.kwargs.items() if key == "device"
    }
    rows, columns = (
        builder("aten.arange.start_step", start, stop, 1, dtype=Symbol("dtype", "int64"), **place)
        for start, stop in shards.outputs[0]
    )
    same = builder("aten.eq.Tensor", builder("aten.unsqueeze.default", rows, 1), columns)
    dtype = Symbol("dtype", call.outputs[0].dtype)
    return builder.program(builder("aten._to_copy.default", same, dtype=dtype))


_ARANGE = Rule(made, _arange_shard)
_EYE = Rule(made, _eye_shard)

_SPACED = ("default", "Scalar_Tensor", "Tensor_Scalar", "Tensor_Tensor")
_WINDOWS = (
    "bartlett_window.default bartlett_window.periodic blackman_window.default "
    "blackman_window.periodic hamming_window.default hamming_window.periodic "
    "hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window.default "
    "hann_window.periodic kaiser_window.beta kaiser_window.default kaiser_window.periodic"
)

RULES = {
    "aten._efficientzerotensor.default": _of_size(linear()),
    "aten.arange.default": _ARANGE,
    "aten.arange.start": _ARANGE,
    "aten.arange.start_step": _ARANGE,
    "aten.empty.memory_format": _of_size(),
    "aten.empty_like.default": _like(),
    "aten.empty_permuted.default": _of_size(),
    "aten.empty_strided.default": Rule(made, _strided(0)),
    "aten.eye.default": _EYE,
    "aten.eye.m": _EYE,
    "aten.full.default": _filled(1, _of_size()),
    "aten.full_like.default": _filled(1, _like()),
    "aten.new_empty.default": _new(),
    "aten.new_empty_strided.default": Rule(lambda call: made(call, unread(0)), _strided(1)),
    "aten.new_full.default": _filled(2, _new()),
    "aten.new_ones.default": _new(),
    "aten.new_zeros.default": _new(linear(0), linear()),
    "aten.ones.default": _of_size(),
    "aten.ones_like.default": _like(),
    "aten.scalar_tensor.default": _filled(0, Rule("=> ()")),
    "sbp.constant.default": _CUT_OUT,
    # Zeros are the sum of zeros: linear in nothing.
    "aten.zeros.default": _of_size(linear()),
    "aten.zeros_like.default": _like(linear(0), linear()),
    **dict.fromkeys((f"aten.linspace.{name}" for name in _SPACED), _CUT_OUT),
    "aten.linspace.Tensor_Tensor": Rule(lambda call: made(call, linear(0, 1)), _cut_out),
    **dict.fromkeys((f"aten.logspace.{name}" for name in _SPACED), _CUT_OUT),
    **dict.fromkeys((f"aten.{name}" for name in _WINDOWS.split()), _CUT_OUT),
    **dict.fromkeys(
        (
            "aten.range.default",
            "aten.range.step",
            "aten.tril_indices.default",
            "aten.triu_indices.default",
        ),
        _CUT_OUT,
    ),
}
