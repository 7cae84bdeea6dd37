"""Sharding rules of padding, and of operators that move elements between dims (`im2col`, pixels).

In notation:

    n c x! => n c y!; linear 0; increasing 0                    padded: x! and y!
    n c y!, n c x! => n c x!; linear 0; unread 1                the gradient
    im2col             n* c (y s!) (x s!) => n* (c k!) (y x)    patches side by side
    pixel_shuffle      n* c (r! s!) h w => n* c (h r!) (w s!)
    channel_shuffle    n (g! c!) x* => n (c! g!) x*
    unfold             a (x s!) => a x k!                       windows side by side

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sbp_aten.rules.formula import by_operator, notation
from sbp_aten.rules.sliding import Slide, space
from sbp_core.signatures import (
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

_PADDED = "why a shard would be elsewhere among the padded elements"


def _dims(rank: int, pad: Sequence[int], *, nonempty: bool = False) -> tuple[str, str]:
    """Return dims before and after padding; padded dims are whole.

    Args:
        rank: Number of dims.
        pad: Elements to add before and after each dim (negative: to take away), last dim first.
        nonempty: Whether kernels need elements in all dims but a batch.
    """
    touched = {rank - 1 - at // 2 for at, number in enumerate(pad) if number}
    with_batch = rank == len(pad) // 2 + 2
    before, after = [], []
    for at in range(rank):
        free = f"d{at}" + "+" * (nonempty and at >= with_batch)
        before.append(f"d{at}!" if at in touched else free)
        after.append(f"p{at}!" if at in touched else free)
    return " ".join(before), " ".join(after)


def _constant(call: OpCall) -> Notation:
    pad = argument(call, 1, "pad")
    before, after = _dims(len(call.inputs[0].shape), pad)
    zero = argument(call, 2, "value", 0) == 0 or max(pad, default=0) <= 0
    linear = "linear 0; " * zero
    return notation(call, f"{before} => {after}; {linear}increasing 0; {_PADDED}")


def _repeated(call: OpCall) -> Notation:
    """Return the notation of padding with elements of the argument itself."""
    before, after = _dims(len(call.inputs[0].shape), argument(call, 1, "padding"), nonempty=True)
    return notation(call, f"{before} => {after}; linear 0; increasing 0; {_PADDED}")


def _repeated_backward(call: OpCall) -> Notation:
    padding = argument(call, 2, "padding")
    before, after = _dims(len(call.inputs[0].shape), padding, nonempty=True)
    # If nothing is repeated, no gradients are added up.
    moved = "; increasing 0" * (max(padding) <= 0)
    text = f"{after}, {before} => {before}; linear 0; unread 1{moved}; {_PADDED}"
    return notation(call, text)


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
        # Windows are the slow factor of the image's rows (with the stride), and of the columns.
        sizes=tuple((name, slides[0].windows) for name in shape.windows[0][:1]),
        why=shape.why,
    )


def _localize_fold(call: OpCall, shards: Shards) -> LocalCall:
    return with_literals(call, (1, "output_size", shards.output_shape()[-2:]))


def _unfold(call: OpCall, *, backward: bool) -> Notation:
    """Windows along one dim; their elements become the last dim. The gradient sums overlaps."""
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
    """Move elements from groups of channels to blocks of pixels, or back."""
    # For an empty image, the reverse operator of PyTorch 2.13 returns the image's shape.
    mark = "" if shuffle else "+"
    channels = f"n*{mark} (c{mark} r! s!) h{mark} w{mark}"
    sides = (channels, "n* c (h r) (w s)")
    both = " => ".join(sides if shuffle else sides[::-1])
    why = "a block of pixels becomes the channels of one pixel"
    return notation(call, f"{both}; linear 0; increasing 0; why {why}")


def _channel_shuffle(call: OpCall) -> Notation:
    """Channels may be split only if `g` or `c` is 1: shuffling a shard gives no shard."""
    moves = argument(call, 1, "groups") not in (1, call.inputs[0].shape[1])
    both = "n (g! c!) x* => n (c g) x*" if moves else "n c x* => n c x*"
    why = "every group has a channel in every part of the result"
    return notation(call, f"{both}; linear 0; increasing 0; why {why}")


def _ungrouped(call: OpCall, shards: Shards) -> LocalCall:
    """Use one group: channels are split only if shuffling them changes nothing."""
    moved = shards.output_shape()[1] == call.outputs[0].shape[1]
    return with_literals(call) if moved else with_literals(call, (1, "groups", 1))


_PADS = [f"{kind}_pad{count}d" for kind in ("reflection", "replication") for count in (1, 2, 3)]

RULES = by_operator(
    {
        "channel_shuffle native_channel_shuffle": Rule(_channel_shuffle, _ungrouped),
        "col2im": Rule(partial(_columns, fold=True), _localize_fold),
        "constant_pad_nd": Rule(_constant),
        "im2col": Rule(partial(_columns, fold=False)),
        "pixel_shuffle": Rule(partial(_pixels, shuffle=True)),
        "pixel_unshuffle": Rule(partial(_pixels, shuffle=False)),
        "unfold unfold_copy": Rule(partial(_unfold, backward=False)),
        "unfold_backward": Rule(
            partial(_unfold, backward=True), with_local_shape(1, "input_sizes")
        ),
        " ".join(_PADS): Rule(_repeated),
        " ".join(f"{name}_backward" for name in _PADS): Rule(_repeated_backward),
    }
)
