"""Interpolation and sampling, forward and backward: batch and channels are free, space mostly not.

    n c (x r!) => n c x        to fewer elements: each comes from a block of `r`
    n c x => n c (x r!)        to more elements: each is repeated `r` times
    n c 1 => n c x             one element is repeated
    n c x! => n c y!           anything else: a shard would need a halo

The backward operators read the same from right to left: a repeated element sums its gradients.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache

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
    unread,
    with_literals,
)


class _Kind(Enum):
    """How interpolation reads the elements around a place."""

    NEAREST = "nearest"
    EXACT = "nearest exact"
    LINEAR = "linear"
    CUBIC = "cubic"
    WIDE = "antialiased"

    @property
    def picks(self) -> bool:
        """Whether each element of the output is one of the input."""
        return self in (_Kind.NEAREST, _Kind.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upsample:
    """The form of one interpolation operator.

    Args:
        count: Number of spatial dims.
        kind: How it interpolates.
        backward: Whether it is the gradient; then argument 2 is the shape of the result.
        vec: Whether scale factors may be given instead of a size.
    """

    count: int
    kind: _Kind
    backward: bool = False
    vec: bool = False

    @property
    def scales(self) -> int:
        """The position of the first scale factor."""
        return 2 + self.backward + (not self.kind.picks)

    def corners(self, call: OpCall) -> bool:
        """Return whether the corners of both grids coincide."""
        return not self.kind.picks and bool(argument(call, self.scales - 1, "align_corners"))

    def factors(self, call: OpCall) -> tuple[float | None, ...]:
        """Return the scale factor of each spatial dim, where one is given."""
        if self.vec:
            given = argument(call, self.scales, "scale_factors")
            return tuple(given) if given is not None else (None,) * self.count
        names = ("scales",) if self.count == 1 else ("scales_d", "scales_h", "scales_w")
        return tuple(
            argument(call, self.scales + at, name) for at, name in enumerate(names[-self.count :])
        )


@cache
def _f32(value: float) -> float:
    """Round to the precision in which kernels compute places."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _picked(kind: _Kind, coarse: int, fine: int, factor: float | None) -> list[int]:
    """Return which of `coarse` elements the kernels pick for each of `fine` ones."""
    scale = _f32(1.0 / factor if factor else coarse / fine)
    shift = 0.5 if kind is _Kind.EXACT else 0.0
    return [min(int(_f32((at + shift) * scale)), coarse - 1) for at in range(fine)]


def _ratio(
    kind: _Kind, source: int, target: int, factor: float | None, corners: bool
) -> tuple[int, int] | None:
    """Return how many elements of source and target make a block of their own; None: all of them.

    Args:
        kind: How it interpolates.
        source: Extent of the input.
        target: Extent of the output.
        factor: The scale factor, if one is given instead of the ratio of the extents.
        corners: Whether the corners of both grids coincide.
    """
    if not source or not target or max(source, target) % min(source, target):
        return None
    block = (1, target // source) if target >= source else (source // target, 1)
    if kind.picks:
        picked = _picked(kind, source, target, factor)
        inside = all(place // block[0] == at // block[1] for at, place in enumerate(picked))
        alike = len({place % block[0] for place in picked}) == 1
        return block if inside and alike else None
    plain = corners or factor is None or factor * source == target
    if block == (1, 1):
        return block if plain else None
    # Places lie amid the blocks, where linear reads 2 elements and cubic 4.
    widest = {_Kind.LINEAR: 2, _Kind.CUBIC: 4}.get(kind)
    narrow = widest is not None and block[0] >= widest
    return block if narrow and plain and not corners else None


def _space(
    form: _Upsample, call: OpCall, source: Sequence[int], target: Sequence[int]
) -> tuple[list[Dim], list[Dim], set[str], str]:
    """Return spatial dims of input and output, the labels that stay whole, and why."""
    dims: tuple[list[Dim], list[Dim]] = [], []
    whole: set[str] = set()
    halo = 0
    for at, factor in enumerate(form.factors(call)):
        have, want = source[at], target[at]
        x, y, r = (f"{name}{at}" for name in "xyr")
        if have == 1 and want > 1 and not (form.vec and factor is not None):
            dims[0].append(())
            dims[1].append((x,))
            continue
        ratio = _ratio(form.kind, have, want, factor, form.corners(call))
        for side, mine, block in zip(dims, (x, y), ratio or (0, 0), strict=True):
            side.append((mine,) if not block else (x,) if block == 1 else (x, r))
        whole |= {x, y} if ratio is None else {r}
        halo = halo if ratio else max(halo, _reads(form.kind, have, want))
    used = {name for side in dims for dim in side for name in dim}
    why = f"a shard would need {halo} neighbouring elements (halo)" if halo else ""
    return *dims, whole & used, why or "a block of elements is read or made together"


def _reads(kind: _Kind, source: int, target: int) -> int:
    """Return how many elements beyond its own block an element of the output reads."""
    taps = {_Kind.NEAREST: 1, _Kind.EXACT: 1, _Kind.LINEAR: 1, _Kind.CUBIC: 3}
    return taps.get(kind) or 2 * (source // max(target, 1)) + 1


def _meaning(form: _Upsample, call: OpCall) -> Notation:
    before, after = (entry.shape[-form.count :] for entry in (call.inputs[0], call.outputs[0]))
    source, target = (after, before) if form.backward else (before, after)
    dims_in, dims_out, whole, why = _space(form, call, source, target)
    # Where the sizes stay, nothing is interpolated.
    same = dims_in == dims_out and not whole
    lead = fresh_dims(len(call.inputs[0].shape) - form.count, "b")
    sides: list[Dims] = [(*lead, *dims_in), (*lead, *dims_out)]
    if form.backward:
        sides.reverse()
    # Interpolated integers are rounded.
    exact = form.kind.picks or not call.inputs[0].dtype.startswith(("int", "uint"))
    rises = same or (form.kind.picks and (not form.backward or _once(form, call, source, target)))
    labels = {name for side in sides for dim in side for name in dim}
    return Notation(
        inputs=(sides[0],),
        outputs=(sides[1],),
        dependences=(*([linear(0)] if exact else []), *([increasing(0)] if rises else [])),
        whole=frozenset(whole),
        nonempty=frozenset(labels - whole - set(lead[0])),
        why=why,
    )


def _once(form: _Upsample, call: OpCall, source: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether no element is picked twice, so that no gradients are added up."""
    dims = zip(source, target, form.factors(call), strict=True)
    return all(
        len(set(_picked(form.kind, have, want, factor))) == want for have, want, factor in dims
    )


def _upsample(form: _Upsample) -> Rule:
    """Return the rule of one interpolation operator."""

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        made = shards.output_shape()
        if form.backward:
            held = tuple(stop - start for start, stop in shards.inputs[0])
            sizes = (1, "output_size", held[-form.count :]), (2, "input_size", made)
            return with_literals(call, *sizes)
        if argument(call, 1, "output_size") is None:
            return with_literals(call)
        return with_literals(call, (1, "output_size", made[-form.count :]))

    return Rule(lambda call: _meaning(form, call), localize)


def _forms() -> dict[str, _Upsample]:
    """Return the form of every interpolation operator, by name."""
    found: dict[str, _Upsample] = {}
    kinds = [
        *((f"upsample_nearest{count}d", count, _Kind.NEAREST) for count in (1, 2, 3)),
        *((f"_upsample_nearest_exact{count}d", count, _Kind.EXACT) for count in (1, 2, 3)),
        ("upsample_linear1d", 1, _Kind.LINEAR),
        ("upsample_bilinear2d", 2, _Kind.LINEAR),
        ("upsample_trilinear3d", 3, _Kind.LINEAR),
        ("upsample_bicubic2d", 2, _Kind.CUBIC),
        *((f"_upsample_{name}2d_aa", 2, _Kind.WIDE) for name in ("bicubic", "bilinear", "lanczos")),
    ]
    for name, count, kind in kinds:
        found[f"aten.{name}.default"] = _Upsample(count=count, kind=kind)
        found[f"aten.{name}.vec"] = _Upsample(count=count, kind=kind, vec=True)
        found[f"aten.{name}_backward.default"] = _Upsample(count=count, kind=kind, backward=True)
    return found


def _sampled(count: int, backward: bool) -> Rule:
    """Return the rule of `grid_sampler`: a grid says where to read for each element of the output.

    n c x!, n y t! => n c y; linear 0          (`x`, `y`: all spatial dims)
    n c y, n c x!, n y t! => n c x!, n y t!; linear 0; linear 1 to 1
    """
    read, made = fresh_dims(count, "x"), fresh_dims(count, "y")
    source, target = (("n",), ("c",), *read), (("n",), ("c",), *made)
    grid: Dims = (("n",), *made, ("t",))
    whole = frozenset([*(name for (name,) in read), "t"])
    why = "the grid may point anywhere, and has all coordinates of a place together"

    def meaning(call: OpCall) -> Notation:
        picks = argument(call, 2, "interpolation_mode") == 1
        return Notation(
            inputs=(source, grid),
            outputs=(target,),
            dependences=(linear(0), increasing(0)) if picks else (linear(0),),
            whole=whole,
            why=why,
        )

    def gradient(call: OpCall) -> Notation:
        wanted = argument(call, 6, "output_mask")[0]
        to_grid = int(wanted)
        # The gradient of the input does not depend on the input, that of the grid does, unless
        # elements are picked: then it is zero.
        picks = argument(call, 3, "interpolation_mode") == 1
        moves = unread(1) if picks else linear(1, outputs=(to_grid,))
        spread = (unread(0),) if picks and not wanted else ()
        reached = (0,) if picks and wanted else None
        return Notation(
            inputs=(target, source, grid),
            outputs=(source, grid) if wanted else (grid,),
            dependences=(*(spread or (linear(0, outputs=reached),)), moves),
            reductions=((f"c@{to_grid}", "none"),) if picks else (),
            whole=whole,
            why=why,
        )

    return Rule(gradient if backward else meaning)


def _affine_grid(call: OpCall) -> Notation:
    """`n r! t! => n y! r!`: coordinates of all places, mapped by a matrix for each sample."""
    rank = len(call.outputs[0].shape)
    places = fresh_dims(rank - 2, "y")
    return Notation(
        inputs=((("n",), ("r",), ("t",)),),
        outputs=((("n",), *places, ("r",)),),
        dependences=(linear(0),),
        whole=frozenset(["r", "t", *(name for (name,) in places)]),
        why="coordinates are counted over the whole extent",
    )


def _sized_batch(call: OpCall, shards: Shards) -> LocalCall:
    size = argument(call, 1, "size")
    return with_literals(call, (1, "size", (shards.output_shape()[0], *size[1:])))


RULES = {
    **{name: _upsample(form) for name, form in _forms().items()},
    **{
        f"aten.grid_sampler_{count}d{'_backward' * backward}.default": _sampled(count, backward)
        for count in (2, 3)
        for backward in (False, True)
    },
    "aten.affine_grid_generator.default": Rule(_affine_grid, _sized_batch),
}
