"""Operators that make tensors out of sizes and numbers; on a shard, of its own size."""

from __future__ import annotations

from sbp_core.signatures.arguments import argument, labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dependence, Notation, linear, unread
from sbp_core.signatures.rule import LocalCall, Rule, Shards, resized


def _filled(*dependences: Dependence) -> Rule:
    """Return the rule of `full(size, ...)` and alike."""

    def meaning(call: OpCall) -> Notation:
        made = tuple((name,) for name in labels("d", len(call.outputs[0].shape)))
        return Notation(inputs=(), outputs=(made,), dependences=dependences)

    return Rule(meaning, resized(0))


def _like(*dependences: Dependence) -> Rule:
    """Return the rule of `full_like(x, ...)` and alike."""

    def meaning(call: OpCall) -> Notation:
        made = tuple((name,) for name in labels("d", len(call.outputs[0].shape)))
        return Notation(inputs=(made,), outputs=(made,), dependences=dependences)

    return Rule(meaning)


def _new(*dependences: Dependence) -> Rule:
    """Return the rule of `x.new_full(size, ...)` and alike, which take only the dtype from `x`."""

    def meaning(call: OpCall) -> Notation:
        given = list(labels("x", len(call.inputs[0].shape)))
        made = tuple((name,) for name in labels("d", len(call.outputs[0].shape)))
        return Notation(
            inputs=(tuple((name,) for name in given),),
            outputs=(made,),
            dependences=dependences,
            whole=frozenset(given),
        )

    return Rule(meaning, resized(1))


def _range(call: OpCall) -> tuple[object, object, object]:
    """Return start, end and step of an `arange` of any overload."""
    if call.op == "aten.arange.default":
        return 0, argument(call, 0, "end"), 1
    step = argument(call, 2, "step", 1) if call.op.endswith("start_step") else 1
    return argument(call, 0, "start"), argument(call, 1, "end"), step


def _arange(call: OpCall) -> Notation:
    """Only ranges of integers may be split: others could round to another length."""
    exact = all(isinstance(bound, int) for bound in _range(call))
    return Notation(inputs=(), outputs=((("n",),),), whole=frozenset() if exact else frozenset("n"))


def _arange_shard(call: OpCall, shards: Shards) -> LocalCall:
    """Start where the shard starts."""
    start, _, step = _range(call)
    ((first, last),) = shards.outputs[0]
    whole = last - first == call.outputs[0].shape[0]
    if whole or not isinstance(start, int) or not isinstance(step, int):
        return LocalCall(op=call.op, args=call.args, kwargs=call.kwargs)
    named = {"start", "end", "step"}
    return LocalCall(
        op="aten.arange.start_step",
        args=(start + first * step, start + last * step, step),
        kwargs={key: value for key, value in call.kwargs.items() if key not in named},
    )


RULES = {
    "aten.arange.default": Rule(_arange, _arange_shard),
    "aten.arange.start": Rule(_arange, _arange_shard),
    "aten.arange.start_step": Rule(_arange, _arange_shard),
    "aten.full.default": _filled(),
    "aten.full_like.default": _like(unread(0)),
    "aten.new_full.default": _new(unread(0)),
    "aten.new_ones.default": _new(unread(0)),
    "aten.new_zeros.default": _new(linear(0), unread(0)),
    "aten.ones.default": _filled(),
    "aten.ones_like.default": _like(unread(0)),
    "aten.scalar_tensor.default": Rule("=> ()"),
    # Zeros are the sum of zeros: linear in nothing.
    "aten.zeros.default": _filled(linear()),
    "aten.zeros_like.default": _like(linear(0), unread(0)),
}
