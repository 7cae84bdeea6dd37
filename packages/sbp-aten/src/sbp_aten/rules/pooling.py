"""Pooling and unpooling, forward and backward: batch and channels are free, space mostly not.

    n c (x r!) => n c x                          windows side by side: `x` may be split
    n c x! => n c y!                             else: a shard would need a halo
    n c m -> n c 1                               the mean over all of a dim is a partial sum
    n c y, n c x!, n c y => n c x!               gradients that go where indices say: partial sums

`n` is missing in calls without batch. Where windows are side by side, the indices that maxima come
with count elements of the whole plane: localisers move them between the plane and its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from sbp_aten.rules.planes import is_whole, moved, plane, spatial
from sbp_aten.rules.sliding import Slide, space, spread
from sbp_core.signatures import (
    Dependence,
    Dims,
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
    increasing,
    linear,
    maxima,
    unread,
    with_literals,
)

#: Shapes of elements and of windows -> how the window slides along each spatial dim.
_Slides = Callable[[OpCall, Sequence[int], Sequence[int]], Iterator[Slide]]


#: The first arguments of the gradient of maxima.
_GRADIENT = ("grad_output", "self")


def _explicit(first: int, *, dilated: bool = False) -> _Slides:
    """Return the reader of `kernel_size, stride, padding(, dilation)`, from argument `first` on."""

    def slides(call: OpCall, elements: Sequence[int], windows: Sequence[int]) -> Iterator[Slide]:
        count = len(elements)
        kernel = spread(argument(call, first, "kernel_size"), count)
        stride = spread(argument(call, first + 1, "stride", ()) or kernel, count)
        padding = spread(argument(call, first + 2, "padding", 0), count)
        dilation = spread(argument(call, first + 3, "dilation", 1) if dilated else 1, count)
        for at in range(count):
            yield Slide(
                elements=elements[at],
                windows=windows[at],
                kernel=kernel[at],
                stride=stride[at],
                padding=padding[at],
                dilation=dilation[at],
            )

    return slides


def _adaptive(_: OpCall, elements: Sequence[int], windows: Sequence[int]) -> Iterator[Slide]:
    """Windows share the elements: evenly and side by side if their number divides that of these."""
    for have, want in zip(elements, windows, strict=True):
        even = want > 0 and have % want == 0
        # Uneven windows overlap by one element.
        kernel = have // want if even else have // max(want, 1) + 2
        step = kernel if even else max(kernel - 1, 1)
        yield Slide(elements=have, windows=want, kernel=kernel, stride=max(step, 1))


def _unrelated(_: OpCall, elements: Sequence[int], windows: Sequence[int]) -> Iterator[Slide]:
    """Windows lie anywhere."""
    for have, want in zip(elements, windows, strict=True):
        yield Slide(elements=have, windows=want, kernel=2, stride=1)


def _pool(
    layout: str,
    count: int,
    slides: _Slides,
    *dependences: Dependence,
    average: bool = False,
    scatters: bool = False,
    why: str = "",
    localize: Localizer | None = None,
) -> Rule:
    """Return the rule of a pooling operator.

    Args:
        layout: What each tensor holds, such as `w e > e`: `w` is one element a window, `e` are the
            elements themselves, `r` random numbers for each channel.
        count: Number of spatial dims.
        slides: How the windows slide.
        *dependences: In what the operator is linear or monotone.
        average: Whether it averages: then it is not linear on integers, which it rounds, and a
            window that holds everything is divisible if `localize` scales.
        scatters: Whether each window adds to the element that its index names: then the windows
            may be dealt out where the elements may not.
        why: Why space is whole, if not for a halo.
        localize: How arguments change on a shard.
    """
    kinds = layout.replace(">", "").split()
    num_inputs = len(layout.split(">")[0].split())

    def meaning(call: OpCall) -> Notation:
        shapes = [entry.shape for entry in (*call.inputs, *call.outputs)]
        elements, windows = (shapes[kinds.index(kind)] for kind in "ew")
        steps = list(slides(call, elements[-count:], windows[-count:]))
        shape = space(steps, divisible=average and localize is not None)
        # Batch and channels, or channels alone.
        lead = fresh_dims(len(elements) - count, "b")
        drawn: Dims = (() if len(lead) == 1 else lead[0], lead[-1], ("t",))
        dealt = {name for dim in shape.windows for name in dim} if scatters else set()
        rounded = average and call.inputs[0].dtype.startswith(("int", "uint"))
        dims = {"e": (*lead, *shape.elements), "w": (*lead, *shape.windows), "r": drawn}
        tensors = [dims[kind] for kind in kinds]
        return Notation(
            inputs=tuple(tensors[:num_inputs]),
            outputs=tuple(tensors[num_inputs:]),
            dependences=(*(() if rounded else dependences), *_by_chance(layout, call, steps)),
            whole=(shape.whole | ({"t"} if "r" in kinds else set())) - dealt,
            nonempty=shape.nonempty | dealt | set(lead[-1]),
            why=why or shape.why,
        )

    return Rule(meaning, localize)


def _by_chance(layout: str, call: OpCall, slides: Sequence[Slide]) -> Iterator[Dependence]:
    """Yield dependences that hold where windows do not overlap, or are single elements."""
    backward = layout.endswith("> e")
    divides = call.op.startswith(("aten.avg_pool2d", "aten.avg_pool3d"))
    divisor = argument(call, 7 if backward else 6, "divisor_override") if divides else None
    if divisor is not None and divisor < 0:
        return
    if backward:
        # Each element gets the gradient of one window at most.
        if all(slide.disjoint for slide in slides):
            yield increasing(0)
    elif all(slide.copies for slide in slides):
        yield increasing(0, outputs=(0,))
        if "max" in call.op:
            yield linear(0, outputs=(0,))


def _scaled(count: int, *, backward: bool) -> Localizer:
    """Return the localiser of an adaptive average: part of a mean is a mean times a ratio."""

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        at = 1 if backward else 0
        have = spatial(shards.inputs[at], count)
        windows = call.inputs[0] if backward else call.outputs[0]
        triples = zip(have, call.inputs[at].shape[-count:], windows.shape[-count:], strict=True)
        ratio = prod(own / all_ for own, all_, want in triples if want == 1 and all_)
        size = spatial(shards.outputs[0], count)
        local = LocalCall(op=call.op, args=call.args, kwargs=call.kwargs)
        if not backward:
            local = with_literals(call, (1, "output_size", size))
        if ratio == 1.0:
            return local
        builder = LocalProgramBuilder()
        made = builder(local.op, *local.args, **local.kwargs)
        return builder.program(builder("aten.mul.Scalar", made, ratio))

    return localize


def _indexed(count: int, *, sized: bool) -> Localizer:
    """Return the localiser of maxima with indices; `sized`: argument 1 is the output's size."""

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        size = (1, "output_size", spatial(shards.outputs[0], count))
        local = with_literals(call, *([size] if sized else []))
        held = plane(shards.inputs[0], call.inputs[0].shape, count)
        if is_whole(held):
            return local
        builder = LocalProgramBuilder()
        values, indices = builder.several(2, local.op, *local.args, **local.kwargs)
        return builder.program(values, moved(builder, indices, held, into=False))

    return localize


def _indexed_backward(count: int, index: int) -> Localizer:
    """Return the localiser of the gradient of maxima, whose indices are argument `index`.

    The kernels for sliding windows want all of them; those for adaptive ones go by the indices.
    """
    scatter = f"aten.adaptive_max_pool{count}d_backward.default"

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        windows = plane(shards.inputs[0], call.inputs[0].shape, count)
        if is_whole(windows):
            return with_literals(call)
        gradient, source = (argument(call, at, name) for at, name in enumerate(_GRADIENT))
        indices = argument(call, index, "indices")
        held = plane(shards.inputs[1], call.inputs[1].shape, count)
        if is_whole(held):
            return LocalCall(op=scatter, args=(gradient, source, indices))
        builder = LocalProgramBuilder()
        indices = moved(builder, indices, held, into=True)
        return builder.program(builder(scatter, gradient, source, indices))

    return localize


def _dealt(count: int) -> Localizer:
    """Return the localiser of `fractional_max_pool_backward`, told the number of windows."""

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        return with_literals(call, (3, "output_size", spatial(shards.inputs[0], count)))

    return localize


def _rules(count: int) -> Iterator[tuple[str, Rule]]:
    """Yield the rules of pooling over `count` spatial dims."""
    slid, slid_back = _explicit(1), _explicit(2)
    adaptive_mean = _pool(
        "e > w", count, _adaptive, linear(0), average=True, localize=_scaled(count, backward=False)
    )
    yield f"adaptive_avg_pool{count}d", adaptive_mean
    yield f"avg_pool{count}d", _pool("e > w", count, slid, linear(0), average=True)
    yield f"max_pool{count}d", _pool("e > w", count, _explicit(1, dilated=True), maxima(0))
    localize = _indexed(count, sized=True)
    yield f"adaptive_max_pool{count}d", _pool("e > w w", count, _adaptive, localize=localize)
    if count == 1:
        return
    gradient = (linear(0), unread(1))
    yield f"_adaptive_avg_pool{count}d", adaptive_mean
    yield (
        f"_adaptive_avg_pool{count}d_backward",
        _pool(
            "w e > e",
            count,
            _adaptive,
            *gradient,
            average=True,
            localize=_scaled(count, backward=True),
        ),
    )
    yield f"avg_pool{count}d_backward", _pool("w e > e", count, slid_back, *gradient, average=True)
    yield (
        f"max_pool{count}d_with_indices",
        _pool(
            "e > w w",
            count,
            _explicit(1, dilated=True),
            localize=_indexed(count, sized=False),
        ),
    )
    localize = _indexed_backward(count, 7)
    name = f"max_pool{count}d_with_indices_backward"
    slides = _explicit(2, dilated=True)
    yield name, _pool("w e w > e", count, slides, *gradient, scatters=True, localize=localize)
    localize = _indexed_backward(count, 2)
    name = f"adaptive_max_pool{count}d_backward"
    rule = _pool("w e w > e", count, _adaptive, *gradient, scatters=True, localize=localize)
    yield name, rule
    random = "the windows lie at random places"
    name = f"fractional_max_pool{count}d"
    yield name, _pool("e r > w w", count, _unrelated, why=random)
    rule = _pool(
        "w e w > e",
        count,
        _unrelated,
        *gradient,
        scatters=True,
        why=random,
        localize=_dealt(count),
    )
    yield f"{name}_backward", rule
    anywhere = "indices point anywhere in the plane, and of equal ones the last counts"
    scatter = (linear(0), increasing(0))
    yield f"max_unpool{count}d", _pool("w w > e", count, _unrelated, *scatter, why=anywhere)


RULES = {f"aten.{name}.default": rule for count in (1, 2, 3) for name, rule in _rules(count)}
