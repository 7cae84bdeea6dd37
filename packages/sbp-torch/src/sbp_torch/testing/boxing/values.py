"""Make the tensors of a boxing case: the whole tensor, input shards, and expected output shards.

They follow directly from the definition of SBP (each mesh axis splits the result of the axis
before), and do not use the geometry in `sbp_core.sbp` and `sbp_core.boxing.slices`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import torch

from sbp_core.sbp import B, Broadcast, NdSbp, Partial, Split
from sbp_torch.testing.boxing.conversion_cases import BoxingCase

#: Mesh coordinate -> shard, in row-major order.
_Shards = Mapping[tuple[int, ...], torch.Tensor]

_CACHED = 1024

#: Largest values: sums are still exact in any order, but a backend that moves values in a narrower
#: dtype gets wrong results.
_LARGEST = {
    "float64": 2**40,
    "float32": 2**20,
    "float16": 2**9,
    "bfloat16": 2**6,
    "int64": 2**40,
    "int32": 2**20,
    "int16": 2**12,
}
_LARGEST_OF_OTHERS = 2**5

_REDUCE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def logical_tensor(case: BoxingCase) -> torch.Tensor:
    """Return the logical tensor of a case: integers, equal on every call and process."""
    return _logical(case.shape, case.dtype).clone()


def source_shards(case: BoxingCase) -> dict[int, torch.Tensor]:
    """Return the shard that each source rank starts with, in memory of its own."""
    placement, sbp = case.source
    parts = _source_parts(case.shape, case.dtype, placement.mesh_shape, sbp)
    return {rank: parts[at].clone() for rank, at in placement.coordinates()}


def source_shard(case: BoxingCase, rank: int) -> torch.Tensor | None:
    """Return the shard that one rank starts with, as `source_shards` does; None outside."""
    placement, sbp = case.source
    if rank not in placement:
        return None
    parts = _source_parts(case.shape, case.dtype, placement.mesh_shape, sbp)
    return parts[placement.coordinate(rank)].clone()


def target_shard(case: BoxingCase, rank: int) -> torch.Tensor:
    """Return the expected shard of a target rank, for a target without `P`; read only."""
    placement, sbp = case.target
    assert not sbp.has_partial, "partial values are free, only what they come to is not"
    parts = _target_parts(case.shape, case.dtype, placement.mesh_shape, sbp)
    return parts[placement.coordinate(rank)]


def target_shape(case: BoxingCase, rank: int) -> tuple[int, ...]:
    """Return the expected shape of the shard of a target rank."""
    placement, sbp = case.target
    whole = NdSbp(*(B if isinstance(entry, Partial) else entry for entry in sbp))
    parts = _target_parts(case.shape, case.dtype, placement.mesh_shape, whole)
    return tuple(parts[placement.coordinate(rank)].shape)


@lru_cache(maxsize=_CACHED)
def _logical(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + sum(shape))
    largest = 1 if dtype == "bool" else _LARGEST.get(dtype, _LARGEST_OF_OTHERS)
    lowest = -largest if getattr(torch, dtype).is_signed else 0
    values = torch.randint(lowest, largest + 1, shape, generator=generator)
    return values.to(getattr(torch, dtype))


@lru_cache(maxsize=_CACHED)
def _source_parts(
    shape: tuple[int, ...], dtype: str, mesh_shape: tuple[int, ...], sbp: NdSbp
) -> _Shards:
    generator = torch.Generator().manual_seed(7)
    return MappingProxyType(scatter(_logical(shape, dtype), sbp, mesh_shape, generator))


@lru_cache(maxsize=_CACHED)
def _target_parts(
    shape: tuple[int, ...], dtype: str, mesh_shape: tuple[int, ...], sbp: NdSbp
) -> _Shards:
    return MappingProxyType(scatter(_logical(shape, dtype), sbp, mesh_shape, torch.Generator()))


def scatter(
    tensor: torch.Tensor,
    sbp: NdSbp,
    mesh_shape: Sequence[int],
    generator: torch.Generator,
    axis: int = 0,
) -> dict[tuple[int, ...], torch.Tensor]:
    """Split a logical tensor into shards, axis by axis; shards of partial values are random.

    Args:
        tensor: A tensor of any shape, and of a dtype that has the partial values of `sbp`.
        sbp: The layout of the tensor on the mesh.
        mesh_shape: The shape of the mesh.
        generator: The generator for partial values.
        axis: The first axis to split over.

    Returns:
        Coordinate on axis `axis` and later axes -> shard.
    """
    if axis == len(sbp):
        return {(): tensor}
    entry, extent = sbp[axis], mesh_shape[axis]
    if isinstance(entry, Broadcast):
        inner = scatter(tensor, sbp, mesh_shape, generator, axis + 1)
        return {(index, *at): part for index in range(extent) for at, part in inner.items()}
    if isinstance(entry, Split):
        # Balanced: the first ranks hold one element more; some may hold nothing.
        parts = list(torch.tensor_split(tensor, extent, entry.dim))
    else:
        parts = _partials(tensor, entry.reduction, extent, generator)
    return {
        (index, *at): inner
        for index, part in enumerate(parts)
        for at, inner in scatter(part, sbp, mesh_shape, generator, axis + 1).items()
    }


def _partials(
    tensor: torch.Tensor, reduction: str, count: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return `count` random tensors whose reduction is `tensor`."""

    def noise() -> torch.Tensor:
        return torch.randint(0, 5, tensor.shape, generator=generator).to(tensor.dtype)

    if reduction == "sum":
        parts = [noise() for _ in range(count - 1)]
        rest = tensor.clone()
        for part in parts:
            rest -= part
        return [*parts, rest]
    if tensor.dtype == torch.bool:
        parts = [
            tensor & noise() if reduction == "max" else tensor | noise() for _ in range(count - 1)
        ]
    else:
        sign = -1 if reduction == "max" else 1
        parts = [tensor + sign * noise() for _ in range(count - 1)]
    # The value itself is in the middle, so that the first rank's part is not the result.
    return [*parts[: count // 2], tensor, *parts[count // 2 :]]


def gather(shards: _Shards, sbp: NdSbp, mesh_shape: Sequence[int]) -> torch.Tensor:
    """Join the shards of `scatter` to the logical tensor: concatenate, reduce, compare copies.

    Raises:
        AssertionError: the copies along a `B` axis differ.
    """
    parts = dict(shards)
    for axis in reversed(range(len(sbp))):
        joined: dict[tuple[int, ...], torch.Tensor] = {}
        for at in dict.fromkeys(at[:axis] for at in parts):
            line = [parts[*at, index] for index in range(mesh_shape[axis])]
            joined[at] = _join(line, sbp, axis)
        parts = joined
    return parts[()]


def _join(line: Sequence[torch.Tensor], sbp: NdSbp, axis: int) -> torch.Tensor:
    """Return the tensor that the shards along one mesh axis represent."""
    entry = sbp[axis]
    if isinstance(entry, Split):
        return torch.cat(list(line), entry.dim)
    if isinstance(entry, Partial):
        total = line[0]
        for part in line[1:]:
            total = _REDUCE[entry.reduction](total, part)
        return total
    copies = all(torch.equal(part, line[0]) for part in line)
    assert copies, f"the copies along mesh axis {axis} of ({sbp}) differ"
    return line[0]
