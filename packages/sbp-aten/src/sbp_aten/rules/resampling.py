"""Sharding rules of interpolation and sampling, forward and backward.

Batch and channels may be split, spatial dims mostly not. In notation:

    n c (x r!) => n c x        to fewer elements: each comes from a block of `r`
    n c x => n c (x r!)        to more elements: each is repeated `r` times
    n c 1 => n c x             one element is repeated
    n c x! => n c y!           anything else: a shard would need a halo

The backward operators have the same notations from right to left: a repeated element sums its
gradients.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial

from sbp_aten.rules.formula import by_operator, notation, stated
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
)


class _Kind(Enum):
    """Method of interpolation: which elements around a place are read."""

    NEAREST = "nearest"
    EXACT = "nearest exact"
    LINEAR = "linear"
    CUBIC = "cubic"
    WIDE = "antialiased"

    @property
    def picks(self) -> bool:
        """Whether each element of the output is a copy of an input element."""
        return self in (_Kind.NEAREST, _Kind.EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upsample:
    """Description of one interpolation operator.

    Args:
        count: Number of spatial dims.
        kind: The method of interpolation.
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
    """Round to float32, in which kernels compute places."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _picked(kind: _Kind, coarse: int, fine: int, factor: float | None) -> list[int]:
    """Return the index among `coarse` elements that kernels pick for each of `fine` elements."""
    scale = _f32(1.0 / factor if factor else coarse / fine)
    shift = 0.5 if kind is _Kind.EXACT else 0.0
    return [min(int(_f32((at + shift) * scale)), coarse - 1) for at in range(fine)]


def _ratio(
    kind: _Kind, source: int, target: int, factor: float | None, corners: bool
) -> tuple[int, int] | None:
    """Return the numbers of source and target elements in an independent block; None: no blocks.

    Args:
        kind: The method of interpolation.
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
    # Places are in the middle of the blocks, where linear reads 2 elements and cubic 4.
    widest = {_Kind.LINEAR: 2, _Kind.CUBIC: 4}.get(kind)
    narrow = widest is not None and block[0] >= widest
    return block if narrow and plain and not corners else None


def _space(
    form: _Upsample, call: OpCall, source: Sequence[int], target: Sequence[int]
) -> tuple[list[Dim], list[Dim], set[str], str]:
    """Return spatial dims of input and output, the labels that stay whole, and the reason."""
    dims: tuple[list[Dim], list[Dim]] = [], []
    whole: set[str] = set()
    halo = 0
    # Number of elements beyond its block that an output element reads.
    reads = {_Kind.NEAREST: 1, _Kind.EXACT: 1, _Kind.LINEAR: 1, _Kind.CUBIC: 3}.get(form.kind)
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
        halo = halo if ratio else max(halo, reads or 2 * (have // max(want, 1)) + 1)
    used = {name for side in dims for dim in side for name in dim}
    why = f"a shard would need {halo} neighbouring elements (halo)" if halo else ""
    return *dims, whole & used, why or "a block of elements is read or made together"


def _meaning(form: _Upsample, call: OpCall) -> Notation:
    before, after = (entry.shape[-form.count :] for entry in (call.inputs[0], call.outputs[0]))
    source, target = (after, before) if form.backward else (before, after)
    dims_in, dims_out, whole, why = _space(form, call, source, target)
    lead = fresh_dims(len(call.inputs[0].shape) - form.count, "b")
    sides: list[Dims] = [(*lead, *dims_in), (*lead, *dims_out)]
    labels = {name for side in sides for dim in side for name in dim}
    # Interpolated integers are rounded.
    exact = form.kind.picks or not call.inputs[0].dtype.startswith(("int", "uint"))
    # If the sizes are equal, nothing is interpolated. If no element is picked twice, no gradients
    # are added up.
    rises = (dims_in == dims_out and not whole) or (
        form.kind.picks
        and all(
            not form.backward or len(set(_picked(form.kind, have, want, factor))) == want
            for have, want, factor in zip(source, target, form.factors(call), strict=True)
        )
    )
    return Notation(
        inputs=(sides[form.backward],),
        outputs=(sides[not form.backward],),
        dependences=(*([linear(0)] if exact else []), *([increasing(0)] if rises else [])),
        whole=frozenset(whole),
        nonempty=frozenset(labels - whole - set(lead[0])),
        why=why,
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


def _interpolations(name: str, count: int, kind: _Kind) -> dict[str, Rule]:
    """Return the rules of an interpolation operator of so many spatial dims."""
    form = partial(_Upsample, count=count, kind=kind)
    return {
        name: _upsample(form()),
        f"{name}.vec": _upsample(form(vec=True)),
        f"{name}_backward": _upsample(form(backward=True)),
    }


_POINTS = "why the grid may point anywhere, and has all coordinates of a place together"


def _sampled(call: OpCall) -> Notation:
    """`grid_sampler`: a grid has the place to read for each element of the output."""
    picks = argument(call, 2, "interpolation_mode") == 1
    clauses = "linear 0" + "; increasing 0" * picks
    return notation(call, f"n c x*!, n y* t! => n c y*; {clauses}; {_POINTS}")


def _sampled_backward(call: OpCall) -> Notation:
    """`n c y*, n c x*!, n y* t! => n c x*, n y* t; linear 0; linear 1 to 1`.

    The gradient of the input does not depend on the input; the gradient of the grid does, unless
    elements are picked: then it is zero.
    """
    wanted = argument(call, 6, "output_mask")[0]
    grid = int(wanted)
    clauses = f"linear 0; linear 1 to {grid}"
    if argument(call, 3, "interpolation_mode") == 1:
        reached = "linear 0 to 0" if wanted else "unread 0"
        clauses = f"{reached}; unread 1; reduce c@{grid} none"
    outputs = "n c x*, n y* t" if wanted else "n y* t"
    return notation(call, f"n c y*, n c x*!, n y* t! => {outputs}; {clauses}; {_POINTS}")


_AFFINE_GRID = "n r! t! => n y*! r; linear 0; why coordinates are counted over the whole extent"


def _sized_batch(call: OpCall, shards: Shards) -> LocalCall:
    size = argument(call, 1, "size")
    return with_literals(call, (1, "size", (shards.output_shape()[0], *size[1:])))


RULES = by_operator(
    {
        **_interpolations("upsample_nearest1d", 1, _Kind.NEAREST),
        **_interpolations("upsample_nearest2d", 2, _Kind.NEAREST),
        **_interpolations("upsample_nearest3d", 3, _Kind.NEAREST),
        **_interpolations("_upsample_nearest_exact1d", 1, _Kind.EXACT),
        **_interpolations("_upsample_nearest_exact2d", 2, _Kind.EXACT),
        **_interpolations("_upsample_nearest_exact3d", 3, _Kind.EXACT),
        **_interpolations("upsample_linear1d", 1, _Kind.LINEAR),
        **_interpolations("upsample_bilinear2d", 2, _Kind.LINEAR),
        **_interpolations("upsample_trilinear3d", 3, _Kind.LINEAR),
        **_interpolations("upsample_bicubic2d", 2, _Kind.CUBIC),
        **_interpolations("_upsample_bicubic2d_aa", 2, _Kind.WIDE),
        **_interpolations("_upsample_bilinear2d_aa", 2, _Kind.WIDE),
        **_interpolations("_upsample_lanczos2d_aa", 2, _Kind.WIDE),
        "affine_grid_generator": stated(_AFFINE_GRID, _sized_batch),
        "grid_sampler_2d grid_sampler_3d": Rule(_sampled),
        "grid_sampler_2d_backward grid_sampler_3d_backward": Rule(_sampled_backward),
    }
)
