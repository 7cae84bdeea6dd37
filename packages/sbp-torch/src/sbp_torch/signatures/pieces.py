"""Cut a tensor into the pieces of ranks, and compare results, to test an operator on shards.

Partial pieces are drawn such that an operator that is not linear cannot pass by chance: summands
have the magnitude of the data, and each `Pattern` refutes another kind of operator, even on a
tensor of one element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

import torch

from sbp_core.errors import SbpValueError
from sbp_core.sbp import NdSbp, Partial, Sbp, Split, split_bounds

#: Relative tolerance by dtype; integers and booleans must be equal.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

#: Relative tolerance of narrower floating-point types.
_COARSE = 0.25


class Pattern(Enum):
    """How partial pieces are drawn; the value is the gap next to a maximum, in data magnitudes.

    `OPPOSED`: summands of an element differ in sign (refutes relu, abs, any clamp).
    `NORMAL`: normal summands (refutes rounding, squares, products of partial values).
    `OWNED`: one rank holds an element, all other ranks zero (refutes affine operators).
    """

    OPPOSED = 1.0
    NORMAL = 8.0
    OWNED = 0.125


def partial_kinds(dtype: torch.dtype) -> tuple[str, ...]:
    """Return the reductions that partial values of a dtype may have.

    The maximum of booleans is their disjunction, the minimum their conjunction; they have no sum.
    """
    if dtype == torch.bool:
        return ("max", "min")
    return ("sum",) if dtype.is_complex else ("sum", "max", "min")


def cut(
    tensor: torch.Tensor,
    sbp: NdSbp,
    mesh_shape: Sequence[int],
    pattern: Pattern,
    draw: torch.Generator,
) -> list[torch.Tensor]:
    """Return the piece of each rank of a mesh, in row-major order; pieces share no memory.

    Args:
        tensor: Any shape and dtype.
        sbp: How it is placed on the mesh.
        mesh_shape: Extent of each mesh axis.
        pattern: How partial pieces are drawn.
        draw: Random numbers for them.

    Raises:
        SbpValueError: the dtype has no such partial values.
    """
    pieces = [tensor]
    for size, entry in zip(mesh_shape, sbp, strict=True):
        pieces = [part for piece in pieces for part in _along(piece, size, entry, pattern, draw)]
    return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]


def _along(
    tensor: torch.Tensor, size: int, entry: Sbp, pattern: Pattern, draw: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yield the piece of each index of one mesh axis."""
    if isinstance(entry, Split):
        for start, stop in split_bounds(tensor.shape[entry.dim], size):
            yield tensor.narrow(entry.dim, start, stop - start)
        return
    if not isinstance(entry, Partial):
        yield from [tensor] * size
        return
    if entry.reduction not in partial_kinds(tensor.dtype):
        raise SbpValueError(
            f"{entry} of {tensor.dtype}",
            accepted=", ".join(str(Partial(kind)) for kind in partial_kinds(tensor.dtype)),
        )
    owner = torch.randint(size, tensor.shape, generator=draw).to(tensor.device)
    if entry.reduction == "sum":
        yield from _summands(tensor, size, owner, pattern, draw)
    else:
        for rank in range(size):
            beside = _non_maxima(tensor, entry.reduction, pattern, draw)
            yield torch.where(owner == rank, tensor, beside)


def _summands(
    tensor: torch.Tensor, size: int, owner: torch.Tensor, pattern: Pattern, draw: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yield summands of a tensor. Integers may overflow, which the sum reverses."""
    if pattern is Pattern.OWNED:
        zero = torch.zeros_like(tensor)
        yield from (torch.where(owner == rank, tensor, zero) for rank in range(size))
        return
    rest = tensor
    sign = (torch.randint(2, tensor.shape, generator=draw) * 2 - 1).to(tensor.device)
    for _ in range(size - 1):
        noise = _noise(tensor, draw)
        if pattern is Pattern.OPPOSED:
            # A NaN may come from one summand alone.
            around = torch.where(tensor.isnan(), 0, tensor).abs()
            noise = (sign * (around + noise.abs())).to(tensor.dtype)
        noise = torch.where(tensor.isinf(), 0, noise)  # infinities have no difference
        rest = rest - noise
        yield noise
    yield rest


def _non_maxima(
    tensor: torch.Tensor, reduction: str, pattern: Pattern, draw: torch.Generator
) -> torch.Tensor:
    """Return values that do not change the maximum (or minimum) with `tensor`."""
    if tensor.dtype == torch.bool:
        coin = torch.randint(2, tensor.shape, generator=draw).to(tensor.device, torch.bool)
        return tensor & coin if reduction == "max" else tensor | coin
    gap = _noise(tensor, draw).abs()
    if tensor.is_floating_point():
        gap = gap * pattern.value
        return tensor - gap if reduction == "max" else tensor + gap
    gap = gap.clamp(1, _magnitude_int(tensor))
    bounds = torch.iinfo(tensor.dtype)
    if reduction == "max":
        return torch.where(tensor < bounds.min + gap, bounds.min, tensor - gap).to(tensor.dtype)
    return torch.where(tensor > bounds.max - gap, bounds.max, tensor + gap).to(tensor.dtype)


def _noise(tensor: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """Return random values of the magnitude of a tensor, in its shape and dtype."""
    if tensor.is_floating_point() or tensor.is_complex():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        noise = torch.randn(tensor.shape, dtype=wide, generator=draw).to(tensor.device)
        return (noise * (magnitude(tensor) or 1.0)).to(tensor.dtype)
    limit = _magnitude_int(tensor)
    low = 0 if tensor.dtype == torch.uint8 else -limit
    noise = torch.randint(low, limit + 1, tensor.shape, generator=draw)
    return noise.to(tensor.device, tensor.dtype)


def magnitude(tensor: torch.Tensor) -> float:
    """Return the mean absolute value of the finite elements of a real or complex tensor."""
    finite = tensor[torch.isfinite(tensor)]
    if not finite.numel():
        return 0.0
    return float(finite.to(torch.complex128 if finite.is_complex() else torch.float64).abs().mean())


def _magnitude_int(tensor: torch.Tensor) -> int:
    """Return a bound of the noise for an integer tensor: its largest value, but at least 5."""
    if not tensor.numel():
        return 5
    low, high = int(tensor.min()), int(tensor.max())
    top = min(torch.iinfo(tensor.dtype).max // 2, 1 << 31)
    return min(max(5, -low, high), top)


def reduce(pieces: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    """Return the elementwise sum, maximum or minimum of pieces of one shape and dtype."""
    stacked = torch.stack(list(pieces))
    if reduction == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def tolerance(dtypes: Sequence[torch.dtype]) -> float:
    """Return the relative tolerance for a computation with these dtypes: the largest of theirs."""
    return max(
        (
            _TOLERANCE.get(dtype, _COARSE)
            for dtype in dtypes
            if dtype.is_floating_point or dtype.is_complex
        ),
        default=0.0,
    )


def difference(
    found: torch.Tensor,
    expected: torch.Tensor,
    *,
    relative: float,
    summands: Sequence[torch.Tensor] = (),
    floor: float = 0.0,
) -> str:
    """Return how two tensors differ; empty if they agree.

    NaN equals NaN, and infinities must be equal. A finite element may differ by `relative` times
    the sum of its own magnitude, the mean magnitude, the magnitudes of its summands, and `floor`.

    Args:
        found: The computed tensor.
        expected: The correct tensor.
        relative: Tolerance; see `tolerance`.
        summands: Pieces whose sum is `found`.
        floor: A magnitude that counts even if all elements are small.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return (
            f"{found.dtype} {list(found.shape)} instead of {expected.dtype} {list(expected.shape)}"
        )
    if torch.equal(found, expected):
        return ""
    if not (expected.is_floating_point() or expected.is_complex()):
        unequal = int((found != expected).sum())
        return f"{unequal} of {expected.numel()} elements differ"
    left, right = _parts(found), _parts(expected)
    scale = right.abs() + (magnitude(right) + floor)
    for piece in summands:
        size = piece.abs().to(torch.float64)
        scale = scale + (size.unsqueeze(-1) if expected.is_complex() else size)
    same = (left == right) | (left.isnan() & right.isnan())
    finite = left.isfinite() & right.isfinite()
    gap = torch.where(same, 0.0, (left - right).abs())
    if bool((same | (finite & (gap <= relative * scale))).all()):
        return ""
    if bool((same | finite).all()):
        return f"differs by up to {gap.max().item():.3g}"
    return "differs in what is infinite or not a number"


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real or complex tensor as float64."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().to(torch.complex128))
    return tensor.to(torch.float64)
