"""Operators that draw random numbers: PyTorch's, and our own, which may be split.

PyTorch's draw from one stream a device. All ranks hold equal streams, so an operator that runs
whole draws the same numbers on all of them; a shard would draw others. Ours, `sbp.random_*`, draw
the number of each element from its place in the logical tensor (see `sbp_torch.ops.random`).
"""

from __future__ import annotations

from dataclasses import replace

from sbp_aten.rules.factories import made
from sbp_core.signatures import (
    KEYWORD_ONLY,
    RANDOM_STAYS_WHOLE,
    Dependence,
    LocalCall,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    fresh_dims,
    increasing,
    linear,
    opaque,
    unread,
)


def _drawn(*dependences: Dependence) -> Rule:
    """Return the rule of an operator that draws numbers: whole, whatever else passes through."""
    whole = opaque(RANDOM_STAYS_WHOLE)
    return Rule(lambda call: replace(whole.notation(call), dependences=dependences))


#: Of the argument only the shape matters.
_SHAPED = _drawn(unread(0))

#: The numbers are added to the argument.
_SHIFTED = _drawn(increasing(0))


def _dropout(call: OpCall) -> Notation:
    """`x -> y, mask`: linear in x, as every rank draws the same mask; without training pointwise.

    With p = 1 nothing is drawn either. Of an empty shard the kernel makes a mask of another dtype.
    """
    dims = fresh_dims(len(call.outputs[0].shape))
    trains = argument(call, 2, "train", True)
    draws = (trains is None or bool(trains)) and argument(call, 1, "p") != 1
    names = frozenset(name for (name,) in dims)
    return Notation(
        inputs=(dims,),
        outputs=(dims, dims),
        dependences=(linear(0, outputs=(0,)), increasing(0, outputs=(0,))),
        whole=names if draws else frozenset(),
        nonempty=frozenset() if draws else names,
        why=RANDOM_STAYS_WHOLE if draws else "the kernel makes a wrong mask of an empty shard",
    )


def _counted_shard(call: OpCall, shards: Shards) -> LocalCall:
    """Tell where in the logical tensor the shard lies; or give it a stream of its own.

    The call itself may draw a part of a larger tensor: `start` and `logical` are given then.
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


_COUNTED = Rule(made, _counted_shard)

_FACTORIES = (
    "normal.float_float rand.default rand.generator randint.default randint.generator randint.low "
    "randint.low_generator randn.default randn.generator randperm.default randperm.generator"
)
_SHAPED_BY = (
    "bernoulli.Tensor bernoulli.p cauchy.default exponential.default geometric.default "
    "log_normal.default normal_functional.default rand_like.default rand_like.generator "
    "randint_like.Tensor randint_like.Tensor_generator randint_like.default "
    "randint_like.generator randint_like.low_dtype randint_like.low_generator_dtype "
    "randn_like.default randn_like.generator random.default random.from random.to uniform.default"
)
_DISTRIBUTED_BY = (
    "_sample_dirichlet.default _standard_gamma.default bernoulli.default binomial.default "
    "multinomial.default normal.float_Tensor poisson.default"
)

RULES = {
    **dict.fromkeys((f"aten.{name}" for name in _FACTORIES.split()), _drawn()),
    **dict.fromkeys((f"aten.{name}" for name in _SHAPED_BY.split()), _SHAPED),
    **dict.fromkeys((f"aten.{name}" for name in _DISTRIBUTED_BY.split()), _drawn()),
    "aten._fused_dropout.default": _drawn(linear(0, outputs=(0,)), increasing(0, outputs=(0,))),
    "aten.native_dropout.default": Rule(_dropout),
    "aten.normal.Tensor_Tensor": _SHIFTED,
    "aten.normal.Tensor_float": _SHIFTED,
    **dict.fromkeys(
        (
            "sbp.random_bernoulli.default",
            "sbp.random_integers.default",
            "sbp.random_normal.default",
            "sbp.random_uniform.default",
        ),
        _COUNTED,
    ),
}
