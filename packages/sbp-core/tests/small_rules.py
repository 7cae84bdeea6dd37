"""A plugin with rules for the few operators of the core's own tests; sbp-aten has all of ATen's."""

from __future__ import annotations

from collections.abc import Mapping

from sbp_core.plugins import Factory, hookimpl
from sbp_core.plugins.hooks import EmptyConfig
from sbp_core.signatures.arguments import labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import (
    Dependence,
    Notation,
    decreasing,
    increasing,
    linear,
    unread,
)
from sbp_core.signatures.patterns import fresh_dims, opaque
from sbp_core.signatures.pointwise import broadcasting
from sbp_core.signatures.rule import OperatorTraits, Rule, RuleSet, with_local_shape

SBP_API_VERSION = 1

#: In what a pointwise operator is linear or monotone, by its kind.
_DEPENDENCES: Mapping[str, tuple[Dependence, ...]] = {
    "add": (linear(0, 1),),
    "lerp": (linear(0, 1),),
    "mul": (linear(0), linear(1)),
    "neg": (linear(0), decreasing(0)),
    "relu": (increasing(0),),
    "sub": (linear(0, 1),),
    "threshold_backward": (linear(0),),
}


def _pointwise(call: OpCall) -> Notation:
    found = _DEPENDENCES.get(call.op.split(".")[1], ())
    held = range(len(call.inputs))
    return broadcasting(call, *(d for d in found if set(d.inputs) <= set(held)))


def _sum(call: OpCall) -> Notation:
    """`d0 d1 => ; linear 0`: what is summed away gives partial sums."""
    return Notation(
        inputs=(fresh_dims(len(call.inputs[0].shape)),), outputs=((),), dependences=(linear(0),)
    )


def _expand(call: OpCall) -> Notation:
    """`() => d0 d1; linear 0`, of a 0-d tensor."""
    made = fresh_dims(len(call.outputs[0].shape))
    return Notation(inputs=((),), outputs=(made,), dependences=(linear(0),))


def _ones(call: OpCall) -> Notation:
    """`=> d0 d1`; what ones are made like is not read: `d0 d1 => d0 d1; unread 0`."""
    dims = fresh_dims(len(call.outputs[0].shape))
    like = (dims,) * len(call.inputs)
    return Notation(inputs=like, outputs=(dims,), dependences=tuple(map(unread, range(len(like)))))


def _view(call: OpCall) -> Notation:
    """Only leading dims that stay as they are can be split: `d0 rest! => d0 rest!`."""
    source, target = call.inputs[0].shape, call.outputs[0].shape
    same = 0
    while same < min(len(source), len(target)) and source[same] == target[same]:
        same += 1
    kept = fresh_dims(same)
    left, right = tuple(labels("x", len(source) - same)), tuple(labels("y", len(target) - same))
    return Notation(
        inputs=((*kept, *((name,) for name in left)),),
        outputs=((*kept, *((name,) for name in right)),),
        dependences=(linear(0), increasing(0)),
        whole=frozenset((*left, *right)),
        why="it becomes part of another dim",
    )


RULES = {
    "aten._softmax.default": Rule("b d! => b d!"),
    "aten.alias.default": Rule("d0 => d0; linear 0; increasing 0"),
    "aten.expand.default": Rule(_expand, with_local_shape(1)),
    "aten.mm.default": Rule("i k, k j -> i j"),
    "aten.ones.default": Rule(_ones, with_local_shape(0)),
    "aten.ones_like.default": Rule(_ones),
    "aten.sum.default": Rule(_sum),
    "aten.t.default": Rule("i j => j i; linear 0; increasing 0; flop 0"),
    "aten.view.default": Rule(_view, with_local_shape(1)),
    "aten.whole.default": opaque("it is only for tests"),
}


@hookimpl
def sbp_signatures() -> Mapping[str, Factory]:
    return {"aten": Factory(build="small_rules:build")}


def build(config: EmptyConfig) -> RuleSet:
    views = frozenset({"alias", "expand", "t", "reshape", "split_with_sizes", "view"})
    traits = OperatorTraits(
        views=views,
        copies=frozenset({"clone"}),
        extremes={"amax": "maximum"},
        on_shards={"aten.view.default": "aten.reshape.default"},
        in_place=dict.fromkeys(("add", "lerp", "mul", "neg", "sub"), (0,)),
    )
    return RuleSet(rules=RULES, pointwise=Rule(_pointwise), traits=traits)
