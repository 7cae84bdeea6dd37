"""Sharding rules of pooling and unpooling operators, forward and backward.

Batch and channel dims may be split. A spatial dim may be split only if the windows do not overlap;
otherwise a shard would need a halo. In notation (`sbp_core.signatures.notation`; `!` marks a label
that may not be split):

    n c (x r!) => n c x                          windows do not overlap: `x` may be split
    n c x! => n c y!                             windows overlap
    n c m -> n c 1                               mean over a whole dim: partial sums
    n c y, n c x!, n c y => n c x!               scatter by indices (backward of max): partial sums

`n` is missing in calls without batch. Max pooling also returns indices into the whole plane. On a
shard, a localiser (a function that adapts a call to a shard) converts them to indices into the
shard, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

from sbp_aten.rules.formula import by_operator
from sbp_aten.rules.sliding import Slide, space, spread
from sbp_aten.rules.windows import is_cut, shape_of
from sbp_core.graph import Ref
from sbp_core.signatures import (
    Bounds,
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

#: (call, shape of elements, shape of windows) -> how the window slides along each spatial dim.
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
    """Windows cover the elements: disjoint and equal if their number divides that of elements."""
    for have, want in zip(elements, windows, strict=True):
        even = want > 0 and have % want == 0
        # Uneven windows overlap by one element.
        kernel = have // want if even else have // max(want, 1) + 2
        step = kernel if even else max(kernel - 1, 1)
        yield Slide(elements=have, windows=want, kernel=kernel, stride=max(step, 1))


def _unrelated(_: OpCall, elements: Sequence[int], windows: Sequence[int]) -> Iterator[Slide]:
    """Windows may be anywhere."""
    for have, want in zip(elements, windows, strict=True):
        yield Slide(elements=have, windows=want, kernel=2, stride=1)


def _pool(
    layout: str,
    count: int,
    slides: _Slides,
    dependences: Sequence[Dependence] = (),
    *,
    average: bool = False,
    scatters: bool = False,
    why: str = "",
    localize: Localizer | None = None,
) -> Rule:
    """Return the rule of a pooling operator.

    Args:
        layout: Role of each tensor, such as `w e > e`: `w` has one element for each window, `e` the
            elements themselves, `r` random numbers for each channel.
        count: Number of spatial dims.
        slides: How the windows slide.
        dependences: The arguments in which the operator is linear or monotone.
        average: Whether it averages: then it is not linear on integers, which it rounds, and a
            single window over everything may be split if `localize` scales.
        scatters: Whether each window adds to the element at its index: then windows may be split
            even if elements may not.
        why: Reason why space is whole, if not for a halo.
        localize: The localiser, which adapts arguments to a shard.
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
    """Yield dependences that hold if windows do not overlap, or are single elements."""
    backward = layout.endswith("> e")
    divides = call.op.startswith(("aten.avg_pool2d", "aten.avg_pool3d"))
    divisor = argument(call, 7 if backward else 6, "divisor_override") if divides else None
    if divisor is not None and divisor < 0:
        return
    if backward:
        # Each element gets the gradient of at most one window.
        if all(slide.disjoint for slide in slides):
            yield increasing(0)
    elif all(slide.copies for slide in slides):
        yield increasing(0, outputs=(0,))
        if "max" in call.op:
            yield linear(0, outputs=(0,))


#: For each spatial dim the half-open bounds of the shard, and the extent of the whole.
_Plane = Sequence[tuple[int, int, int]]


def _spatial(bounds: Bounds, count: int) -> tuple[int, ...]:
    """Return the local extents of the last dims."""
    return shape_of(bounds[-count:])


def _plane(bounds: Bounds, shape: Sequence[int], count: int) -> _Plane:
    """Return the position of the last `count` dims of a shard; empty if it is the whole."""
    pairs = zip(bounds[-count:], shape[-count:], strict=True)
    found = [(*pair, extent) for pair, extent in pairs]
    return found if any(is_cut(pair[:2], pair[2]) for pair in found) else ()


def _moved(builder: LocalProgramBuilder, indices: Ref, plane: _Plane, into: bool) -> Ref:
    """Add the calls that convert indices into a shard to indices into the plane, or back.

    Args:
        builder: Collects the calls.
        indices: Flat indices (int64).
        plane: For each spatial dim the bounds of the shard and the extent of the whole.
        into: Whether to convert from the plane to the shard.
    """
    before = [extent if into else stop - start for start, stop, extent in plane]
    after = [stop - start if into else extent for start, stop, extent in plane]
    shift = [-start if into else start for start, _, _ in plane]
    if before[1:] == after[1:]:
        return builder("aten.add.Scalar", indices, shift[0] * prod(after[1:]))
    total: Ref | None = None
    for at in range(len(plane)):
        place = builder("aten.floor_divide.Scalar", indices, prod(before[at + 1 :]))
        place = builder("aten.remainder.Scalar", place, before[at])
        place = builder("aten.add.Scalar", place, shift[at])
        place = builder("aten.mul.Scalar", place, prod(after[at + 1 :]))
        total = place if total is None else builder("aten.add.Tensor", total, place)
    return total or indices


def _scaled(count: int, *, backward: bool) -> Localizer:
    """Return the localiser of an adaptive average: a part of a mean is a mean times a ratio."""

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        at = int(backward)
        have = _spatial(shards.inputs[at], count)
        windows = call.inputs[0] if backward else call.outputs[0]
        triples = zip(have, call.inputs[at].shape[-count:], windows.shape[-count:], strict=True)
        ratio = prod(own / all_ for own, all_, want in triples if want == 1 and all_)
        size = (1, "output_size", _spatial(shards.outputs[0], count))
        local = with_literals(call, *[] if backward else [size])
        if ratio == 1.0:
            return local
        builder = LocalProgramBuilder()
        made = builder(local.op, *local.args, **local.kwargs)
        return builder.program(builder("aten.mul.Scalar", made, ratio))

    return localize


def _indexed(count: int, *, sized: bool) -> Localizer:
    """Return the localiser of maxima with indices; `sized`: argument 1 is the output's size."""

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        size = (1, "output_size", _spatial(shards.outputs[0], count))
        local = with_literals(call, *([size] if sized else []))
        held = _plane(shards.inputs[0], call.inputs[0].shape, count)
        if not held:
            return local
        builder = LocalProgramBuilder()
        values, indices = builder.several(2, local.op, *local.args, **local.kwargs)
        return builder.program(values, _moved(builder, indices, held, into=False))

    return localize


def _indexed_backward(count: int, index: int) -> Localizer:
    """Return the localiser of the gradient of maxima, whose indices are argument `index`.

    The kernels for sliding windows need all of them; the adaptive kernels use only the indices.
    """
    scatter = f"aten.adaptive_max_pool{count}d_backward.default"

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        if not _plane(shards.inputs[0], call.inputs[0].shape, count):
            return with_literals(call)
        gradient, source = (argument(call, at, name) for at, name in enumerate(_GRADIENT))
        indices = argument(call, index, "indices")
        held = _plane(shards.inputs[1], call.inputs[1].shape, count)
        if not held:
            return LocalCall(op=scatter, args=(gradient, source, indices))
        builder = LocalProgramBuilder()
        indices = _moved(builder, indices, held, into=True)
        return builder.program(builder(scatter, gradient, source, indices))

    return localize


def _dealt(count: int) -> Localizer:
    """Return the localiser of `fractional_max_pool_backward`: adapts the number of windows."""
    return lambda call, shards: with_literals(
        call, (3, "output_size", _spatial(shards.inputs[0], count))
    )


_RANDOM = "the windows are at random places"
_ANYWHERE = "indices point anywhere in the plane, and of equal ones the last counts"


def _rules(count: int) -> dict[str, Rule]:
    """Return the rules of pooling over `count` spatial dims."""
    gradient = (linear(0), unread(1))
    scattered = partial(_pool, "w e w > e", count, dependences=gradient, scatters=True)
    size = f"{count}d"
    rules = {
        f"adaptive_avg_pool{size}" + f" _adaptive_avg_pool{size}" * (count > 1): _pool(
            "e > w",
            count,
            _adaptive,
            (linear(0),),
            average=True,
            localize=_scaled(count, backward=False),
        ),
        f"adaptive_max_pool{size}": _pool(
            "e > w w", count, _adaptive, localize=_indexed(count, sized=True)
        ),
        f"avg_pool{size}": _pool("e > w", count, _explicit(1), (linear(0),), average=True),
        f"max_pool{size}": _pool("e > w", count, _explicit(1, dilated=True), (maxima(0),)),
    }
    if count == 1:
        return rules
    return rules | {
        f"_adaptive_avg_pool{size}_backward": _pool(
            "w e > e",
            count,
            _adaptive,
            gradient,
            average=True,
            localize=_scaled(count, backward=True),
        ),
        f"adaptive_max_pool{size}_backward": scattered(
            _adaptive, localize=_indexed_backward(count, 2)
        ),
        f"avg_pool{size}_backward": _pool("w e > e", count, _explicit(2), gradient, average=True),
        f"fractional_max_pool{size}": _pool("e r > w w", count, _unrelated, why=_RANDOM),
        f"fractional_max_pool{size}_backward": scattered(
            _unrelated, why=_RANDOM, localize=_dealt(count)
        ),
        f"max_pool{size}_with_indices": _pool(
            "e > w w", count, _explicit(1, dilated=True), localize=_indexed(count, sized=False)
        ),
        f"max_pool{size}_with_indices_backward": scattered(
            _explicit(2, dilated=True), localize=_indexed_backward(count, 7)
        ),
        f"max_unpool{size}": _pool(
            "w w > e", count, _unrelated, (linear(0), increasing(0)), why=_ANYWHERE
        ),
    }


RULES = by_operator({ops: rule for count in (1, 2, 3) for ops, rule in _rules(count).items()})
