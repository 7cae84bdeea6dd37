"""Sharding rules of operators that make tensors from sizes and numbers, or draw random numbers.

On a shard, factories make a tensor of the shard's size. If the numbers of a shard would be rounded
differently (`linspace`), the whole is made and the shard is cut out.

PyTorch's random numbers come from one stream a device. All ranks hold equal streams, so an operator
that is not split draws the same numbers on all of them; a shard would draw other numbers. Our
operators `sbp.random_*` compute the number of each element from its position in the logical tensor
(see `sbp_torch.ops.random`), so they may be split.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from dataclasses import replace

from sbp_aten.rules.formula import by_operator, notation, stated
from sbp_core.graph import Argument, Symbol
from sbp_core.signatures import (
    KEYWORD_ONLY,
    RANDOM_STAYS_WHOLE,
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
    increasing,
    linear,
    opaque,
    run_as_is,
    unread,
    with_local_shape,
)


def _made(call: OpCall, *clauses: str) -> Notation:
    """Return `=> d*`: tensor arguments, if there are any, only provide numbers or a dtype.

    Their labels are x0_0, x0_1, ...; the output does not depend on them.
    """
    inputs = [f"x{at}_*" for at in range(len(call.inputs))]
    none = (f"reduce {run} none" for run in inputs)
    return notation(call, "; ".join([f"{', '.join(inputs)} => d*", *clauses, *none]))


def _of_size(*clauses: str) -> Rule:
    """Return the rule of `zeros(size, ...)` and similar factories."""
    return Rule(lambda call: _made(call, *clauses), with_local_shape(0))


def _new(*clauses: str) -> Rule:
    """Return the rule of `x.new_ones(size, ...)` etc., which take only the dtype from `x`."""
    return Rule(lambda call: _made(call, "unread 0", *clauses), with_local_shape(1))


#: Notation of `ones_like(x, ...)` and similar factories.
_LIKE = "d* => d*; unread 0"


def _filled(index: int, rule: Rule) -> Rule:
    """Return the rule of an operator that fills in the number at `index`; 0 is a sum of zeros."""

    def meaning(call: OpCall) -> Notation:
        found = rule.notation(call)
        value = argument(call, index, "fill_value" if index else "s")
        if not isinstance(value, int | float) or value != 0:
            return found
        sums = (linear(), *([linear(0)] if call.inputs else []))
        return replace(found, dependences=(*found.dependences, *sums))

    return Rule(meaning, rule.localize)


def _cut_out(call: OpCall, shards: Shards) -> LocalProgram:
    """Make the whole, and cut out the shard: `slice(slice(linspace(...), 0, ...), 1, ...)`."""
    builder = LocalProgramBuilder()
    value = builder(call.op, *call.args, **call.kwargs)
    for dim, ((start, stop), extent) in enumerate(
        zip(shards.outputs[0], call.outputs[0].shape, strict=True)
    ):
        if stop - start != extent:
            value = builder("aten.slice.Tensor", value, dim, start, stop)
    return builder.program(value)


#: Rule of an operator whose values depend on all sizes, so every rank makes the whole.
_CUT_OUT = Rule(_made, _cut_out)


def _strided(index: int) -> Localizer:
    """Return the localiser for sizes at `index` and strides after it: dense, in the same order."""

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


def _arange_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Start where the shard starts; only for integers, because reals would round differently."""
    start, end, step = 0, argument(call, 0, "end"), 1
    if call.op != "aten.arange.default":
        start, end = argument(call, 0, "start"), argument(call, 1, "end")
        step = argument(call, 2, "step", 1) if call.op.endswith("start_step") else 1
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


# Random numbers


def _drawn(*dependences: Dependence) -> Rule:
    """Return the rule of an operator that draws numbers: not split, but may be partial."""
    whole = opaque(RANDOM_STAYS_WHOLE)
    return Rule(lambda call: replace(whole.notation(call), dependences=dependences))


def _dropout(call: OpCall) -> Notation:
    """`x -> y, mask`: linear in x, as every rank draws the same mask; without training pointwise.

    With p = 1 nothing is drawn either. For an empty shard the kernel makes a mask of another dtype.
    """
    trains = argument(call, 2, "train", True)
    draws = (trains is None or bool(trains)) and argument(call, 1, "p") != 1
    mark = "!" if draws else "+"
    why = RANDOM_STAYS_WHOLE if draws else "the kernel makes a wrong mask of an empty shard"
    return notation(call, f"d*{mark} => d*, d*; linear 0 to 0; increasing 0 to 0; why {why}")


def _counted_shard(call: OpCall, shards: Shards) -> LocalCall:
    """Pass the shard's position in the logical tensor (`start`, `logical`), or a separate `stream`.

    The call itself may draw a part of a larger tensor: it has `start` and `logical` then.
    """
    made_shape = call.outputs[0].shape
    logical = argument(call, KEYWORD_ONLY, "logical") or made_shape
    first = argument(call, KEYWORD_ONLY, "start") or (0,) * len(made_shape)
    start = tuple(at + begin for at, (begin, _) in zip(first, shards.outputs[0], strict=True))
    size = shards.output_shape()
    kwargs = dict(call.kwargs)
    if argument(call, KEYWORD_ONLY, "per_shard", False):
        place = 0
        for extent, begin in zip(logical, start, strict=True):
            place = place * extent + begin
        kwargs["stream"] = place
    elif size != made_shape:
        kwargs.update(start=start, logical=logical)
    return LocalCall(op=call.op, args=(size, *call.args[1:]), kwargs=kwargs)


_DRAWN = (
    "_sample_dirichlet _standard_gamma bernoulli binomial multinomial normal.float_Tensor "
    "normal.float_float poisson rand rand.generator randint randint.generator randint.low "
    "randint.low_generator randn randn.generator randperm randperm.generator"
)

#: Random operators that read only the shape of their argument.
_DRAWN_LIKE = (
    "bernoulli.Tensor bernoulli.p cauchy exponential geometric log_normal normal_functional "
    "rand_like rand_like.generator randint_like randint_like.Tensor randint_like.Tensor_generator "
    "randint_like.generator randint_like.low_dtype randint_like.low_generator_dtype randn_like "
    "randn_like.generator random random.from random.to uniform"
)

_WINDOWS = (
    "bartlett_window.default bartlett_window.periodic blackman_window.default "
    "blackman_window.periodic hamming_window.default hamming_window.periodic "
    "hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window.default "
    "hann_window.periodic kaiser_window.beta kaiser_window.default kaiser_window.periodic"
)


RULES = by_operator(
    {
        # Zeros are a sum of zeros, so they may be partial: linear in no argument.
        "_efficientzerotensor zeros": _of_size("linear"),
        "_fused_dropout": _drawn(linear(0, outputs=(0,)), increasing(0, outputs=(0,))),
        _DRAWN: _drawn(),
        _DRAWN_LIKE: _drawn(unread(0)),
        "arange arange.start arange.start_step": Rule(_made, _arange_shard),
        "empty.memory_format empty_permuted ones": _of_size(),
        "empty_like ones_like": stated(_LIKE),
        "empty_strided": Rule(_made, _strided(0)),
        "eye eye.m": Rule(_made, _eye_shard),
        "full": _filled(1, _of_size()),
        "full_like": _filled(1, stated(_LIKE)),
        "native_dropout": Rule(_dropout),
        "new_empty new_ones": _new(),
        "new_empty_strided": Rule(lambda call: _made(call, "unread 0"), _strided(1)),
        "new_full": _filled(2, _new()),
        "new_zeros": _new("linear 0", "linear"),
        # The numbers are added to the argument.
        "normal.Tensor_Tensor normal.Tensor_float": _drawn(increasing(0)),
        "scalar_tensor": _filled(0, Rule("=> ()")),
        "zeros_like": stated(f"{_LIKE}; linear 0; linear"),
        "linspace.Tensor_Tensor": Rule(lambda call: _made(call, "linear 0 1"), _cut_out),
        "linspace linspace.Scalar_Tensor linspace.Tensor_Scalar": _CUT_OUT,
        "logspace logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor": _CUT_OUT,
        "range range.step tril_indices triu_indices": _CUT_OUT,
        _WINDOWS: _CUT_OUT,
    }
) | by_operator(
    {
        "constant": _CUT_OUT,
        "random_bernoulli random_integers random_normal random_uniform": Rule(
            _made, _counted_shard
        ),
    },
    "sbp",
)
