"""Sharding rules of convolutions, forward and backward, transposed or not.

A convolution is a sum of products over channels. In notation:

    n (g i) x!, (g o) i k!, (g o)    -> n (g o) y!               forward, with a bias
    n (g i) x!, (g i) o k!, (g o)    -> n (g o) y!               transposed
    n (g o) y!, n (g i) x!, (g o) i k! => n (g i) x!, (g o) i k!, (g o)    backward

Spatial dims follow `rules.sliding`: they may be split if no window reaches into another shard.
Shards of channels may not be empty, because the kernels refuse weights without channels.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple

from sbp_aten.rules.formula import by_operator
from sbp_aten.rules.sliding import Slide, space, spread
from sbp_aten.rules.windows import length
from sbp_core.graph import Argument
from sbp_core.signatures import (
    Dependence,
    Dim,
    Dims,
    LocalCall,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    increasing,
    linear,
    unread,
    with_literals,
)


class _Labelled(NamedTuple):
    """Labels of the dims of a convolution, for the forward or the backward operator.

    Args:
        source, target: Dims of the input and of the output.
        weight, bias: Dims of the weights and of the bias.
        work_flop: Work of one sum of products.
        rest: The rest of the notation: labels that may not be split or whose shards may not be
            empty, channels included, and the extent of the groups.
    """

    source: Dims
    target: Dims
    weight: Dims
    bias: Dims
    work_flop: float
    rest: Mapping[str, Any]


def _labelled(call: OpCall, shapes: tuple[tuple[int, ...], ...], first: int) -> _Labelled:
    """Return the labels of a convolution.

    Args:
        call: The call.
        shapes: Shapes of its input, output and weights.
        first: Position of the argument `stride`; padding and so on follow.
    """
    source, target, weight = shapes
    count = len(source) - 2
    transposed = bool(argument(call, first + 3, "transposed", False))
    groups = argument(call, first + 5, "groups", 1)
    stride, padding, dilation = (
        spread(argument(call, first + at, name), count)
        for at, name in enumerate(("stride", "padding", "dilation"))
    )
    large, small = (target, source) if transposed else (source, target)
    shape = space(
        [
            Slide(
                elements=large[at + 2],
                windows=small[at + 2],
                kernel=weight[at + 2],
                stride=stride[at],
                padding=padding[at],
                dilation=dilation[at],
            )
            for at in range(count)
        ],
        divisible=True,
    )
    inputs, outputs = source[1] // groups, target[1] // groups
    sizes = {"g": groups, "i": inputs, "o": outputs}

    def dim(*names: str) -> Dim:
        return tuple(name for name in names if sizes[name] != 1)

    channels = (dim("g", "i"), dim("o")) if transposed else (dim("g", "o"), dim("i"))
    in_space = (shape.windows, shape.elements) if transposed else (shape.elements, shape.windows)
    used = {name for name, size in sizes.items() if size != 1}
    return _Labelled(
        source=(("n",), dim("g", "i"), *in_space[0]),
        target=(("n",), dim("g", "o"), *in_space[1]),
        weight=(*channels, *shape.kernel),
        bias=(dim("g", "o"),),
        work_flop=2.0 * prod(weight) * source[0] * prod(small[2:]),
        rest={
            "whole": shape.whole,
            "nonempty": shape.nonempty | used,
            "sizes": (("g", groups),) if groups != 1 else (),
            "why": shape.why,
        },
    )


def _forward(call: OpCall) -> Notation:
    shapes = call.inputs[0].shape, call.outputs[0].shape, call.inputs[1].shape
    labelled = _labelled(call, shapes, 3)
    with_bias = len(call.inputs) == 3
    return Notation(
        inputs=(labelled.source, labelled.weight, *([labelled.bias] if with_bias else [])),
        outputs=(labelled.target,),
        addends=(0, 0, 1) if with_bias else (0, 0),
        # Each element of the output increases with one element of the bias.
        dependences=(increasing(2),) if with_bias else (),
        work_flop=labelled.work_flop,
        **labelled.rest,
    )


def _backward(call: OpCall) -> Notation:
    """Return the notation: each gradient is a product of two of the three tensors, or a sum.

    output                    is computed from
    gradient of the input     gradient, weights
    gradient of the weights   gradient, input
    gradient of the bias      gradient
    """
    gradient, source, weight = (entry.shape for entry in call.inputs)
    labelled = _labelled(call, (source, gradient, weight), 4)
    wanted = tuple(argument(call, 10, "output_mask"))
    positions = dict(zip([at for at in range(3) if wanted[at]], range(3), strict=False))
    results = (labelled.source, labelled.weight, labelled.bias)
    # A label that an output lacks is summed over, unless no factor of the output has it: the
    # gradient of the bias does not depend on the input channels `i`, so it stays whole, not P.
    labels = {name for tensor in results for dim in tensor for name in dim}
    factors = {
        0: labelled.target + labelled.weight,
        1: labelled.target + labelled.source,
        2: labelled.target,
    }
    independent = [
        (f"{label}@{at}", "none")
        for output, at in positions.items()
        for label in sorted(labels - {name for dim in factors[output] for name in dim})
    ]
    return Notation(
        inputs=(labelled.target, labelled.source, labelled.weight),
        outputs=tuple(results[output] for output in positions),
        dependences=(linear(0), *_bilinear(positions.get(1), positions.get(0))),
        reductions=tuple(independent),
        work_flop=labelled.work_flop * (wanted[0] + wanted[1]) + prod(gradient) * wanted[2],
        **labelled.rest,
    )


def _bilinear(of_weight: int | None, of_input: int | None) -> Iterator[Dependence]:
    """Yield the dependences on input and weights: each is read only for the other's gradient.

    Args:
        of_weight: Output position of the weights' gradient; None if it is not requested.
        of_input: Output position of the input's gradient; None if it is not requested.
    """
    for position, output in ((1, of_weight), (2, of_input)):
        yield unread(position) if output is None else linear(position, outputs=(output,))
    if of_weight is not None and of_input is not None:
        yield linear(1, 2, outputs=(of_input, of_weight))


def _local(call: OpCall, shards: Shards, *, backward: bool) -> LocalCall:
    """Adapt the number of groups: channels of the shard / channels of a group in the weights."""
    first = 4 if backward else 3
    groups: int = argument(call, first + 5, "groups", 1)
    transposed = argument(call, first + 3, "transposed", False)
    # Shards of gradient, input and weights, or of input and output.
    bounds = shards.inputs if backward else (*shards.inputs, *shards.outputs)
    source, target = (1, 0) if backward else (0, -1)
    channels = length(bounds[target if transposed else source][1])
    of_group = length(shards.inputs[2 if backward else 1][1])
    if groups != 1 and of_group:
        groups = channels // of_group
    changes: list[tuple[int, str, Argument]] = [(first + 5, "groups", groups)]
    if backward and argument(call, 3, "bias_sizes") is not None:
        changes.append((3, "bias_sizes", (length(shards.inputs[0][1]),)))
    return with_literals(call, *changes)


RULES = by_operator(
    {
        "convolution": Rule(_forward, partial(_local, backward=False)),
        "convolution_backward": Rule(_backward, partial(_local, backward=True)),
    }
)
