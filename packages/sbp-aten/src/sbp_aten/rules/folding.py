"""Operators that move elements between dims: patches as columns, pixels as channels.

im2col             n c (y s!) (x s!) => n (c k!) (y x)      patches side by side
pixel_shuffle      n (c r! s!) h w -> n c (h r!) (w s!)
channel_shuffle    n (g! c!) x => n (c! g!) x
unfold             a (x s!) => a x k!                       windows side by side
"""

from __future__ import annotations

from functools import partial

from sbp_aten.rules.sliding import Slide, space
from sbp_core.signatures import (
    Dim,
    Dims,
    LocalCall,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    fresh_dims,
    increasing,
    linear,
    with_literals,
    with_local_shape,
    wrap_dim,
)


def _columns(call: OpCall, *, fold: bool) -> Notation:
    """Return the notation of `im2col`, or of `col2im`, which sums where patches overlap."""
    image = (call.outputs if fold else call.inputs)[0].shape
    first = 2 if fold else 1
    kernel, dilation, padding, stride = (
        argument(call, first + at, name)
        for at, name in enumerate(("kernel_size", "dilation", "padding", "stride"))
    )
    slides = []
    for at, extent in enumerate(image[-2:]):
        reach = dilation[at] * (kernel[at] - 1) + 1
        slides.append(
            Slide(
                elements=extent,
                windows=(extent + 2 * padding[at] - reach) // stride[at] + 1,
                kernel=kernel[at],
                stride=stride[at],
                padding=padding[at],
                dilation=dilation[at],
            )
        )
    shape = space(slides)
    windows = tuple(name for dim in shape.windows for name in dim)
    lead = fresh_dims(len(image) - 3, "n")
    images: Dims = (*lead, ("c",), *shape.elements)
    columns: Dims = (*lead, ("c", "k"), windows)
    disjoint = all(slide.reach <= slide.stride for slide in slides)
    return Notation(
        inputs=(columns if fold else images,),
        outputs=(images if fold else columns,),
        dependences=(linear(0), *([increasing(0)] if disjoint or not fold else [])),
        whole=shape.whole | {"k"},
        nonempty=shape.nonempty | {"c"},
        # Windows lead both the rows of the image, with their stride, and the columns.
        sizes=tuple((name, slides[0].windows) for name in shape.windows[0][:1]),
        why=shape.why,
    )


def _localize_fold(call: OpCall, shards: Shards) -> LocalCall:
    return with_literals(call, (1, "output_size", shards.output_shape()[-2:]))


def _unfold(call: OpCall, *, backward: bool) -> Notation:
    """Windows along one dim; what each holds becomes the last dim. The gradient sums overlaps."""
    types = (call.outputs[0], call.inputs[0]) if backward else (call.inputs[0], call.outputs[0])
    whole, made = (entry.shape for entry in types)
    first = 2 if backward else 1
    at = wrap_dim(argument(call, first, "dim" if backward else "dimension"), len(whole))
    size, step = argument(call, first + 1, "size"), argument(call, first + 2, "step")
    before, after = list(fresh_dims(len(whole))), list(fresh_dims(len(whole)))
    slides = [
        Slide(elements=extent, windows=made[at], kernel=size, stride=step)
        for extent in whole[at : at + 1]
    ]
    shape = space(slides)
    before[at : at + 1], after[at : at + 1] = shape.elements, shape.windows
    sides: list[Dims] = [tuple(before), (*after, ("k",))]
    return Notation(
        inputs=(sides[backward],),
        outputs=(sides[not backward],),
        dependences=(linear(0), *([increasing(0)] if size <= step or not backward else [])),
        whole=shape.whole | {"k"},
        nonempty=shape.nonempty,
        work_flop=None if backward or call.op.endswith("_copy.default") else 0.0,
        why=shape.why or "each window needs all of its elements",
    )


def _pixels(call: OpCall, *, shuffle: bool) -> Notation:
    """Blocks of pixels and groups of channels trade places."""
    rank = len(call.inputs[0].shape)
    lead = fresh_dims(rank - 3, "n")
    channels: Dims = (*lead, ("c", "r", "s"), ("h",), ("w",))
    pixels: Dims = (*lead, ("c",), ("h", "r"), ("w", "s"))
    return Notation(
        inputs=(channels if shuffle else pixels,),
        outputs=(pixels if shuffle else channels,),
        dependences=(linear(0), increasing(0)),
        whole=frozenset("rs"),
        # PyTorch 2.13 gives the reverse of an empty image the shape of the image.
        nonempty=frozenset() if shuffle else frozenset(name for (name,) in lead) | set("chw"),
        why="a block of pixels becomes the channels of one pixel",
    )


def _channel_shuffle(call: OpCall) -> Notation:
    """`(g c) -> (c g)`: shards of channels are none of the result, unless `g` or `c` is 1."""
    shape, groups = call.inputs[0].shape, argument(call, 1, "groups")
    space_dims = fresh_dims(len(shape) - 2, "x")
    moves = groups not in (1, shape[1])
    before: Dim = ("g", "c") if moves else ("c",)
    return Notation(
        inputs=((("n",), before, *space_dims),),
        outputs=((("n",), before[::-1], *space_dims),),
        dependences=(linear(0), increasing(0)),
        whole=frozenset("gc") if moves else frozenset(),
        why="every group has a channel in every part of the result",
    )


def _ungrouped(call: OpCall, shards: Shards) -> LocalCall:
    """Channels are split only where shuffling them changes nothing, as with one group."""
    moved = shards.output_shape()[1] == call.outputs[0].shape[1]
    return with_literals(call) if moved else with_literals(call, (1, "groups", 1))


RULES = {
    "aten.channel_shuffle.default": Rule(_channel_shuffle, _ungrouped),
    "aten.native_channel_shuffle.default": Rule(_channel_shuffle, _ungrouped),
    "aten.col2im.default": Rule(partial(_columns, fold=True), _localize_fold),
    "aten.im2col.default": Rule(partial(_columns, fold=False)),
    "aten.pixel_shuffle.default": Rule(partial(_pixels, shuffle=True)),
    "aten.pixel_unshuffle.default": Rule(partial(_pixels, shuffle=False)),
    "aten.unfold.default": Rule(partial(_unfold, backward=False)),
    "aten.unfold_backward.default": Rule(
        partial(_unfold, backward=True), with_local_shape(1, "input_sizes")
    ),
    "aten.unfold_copy.default": Rule(partial(_unfold, backward=False)),
}
