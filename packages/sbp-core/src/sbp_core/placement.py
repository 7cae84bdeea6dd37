"""Placements: meshes of ranks with named axes, and the groups that collectives work in.

A placement is what PyTorch calls a `DeviceMesh`. This module holds no tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, cast

from sbp_core.errors import SbpValueError
from sbp_core.serialize import JsonForm

if TYPE_CHECKING:
    pass

__all__ = ["Placement"]

#: Ranks of the largest machine; products of some of them fit into NumPy's 64 bits.
MOST_RANKS = 2**24

Nested = int | Sequence["Nested"]


def _flatten(nested: Nested) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (mesh shape, ranks in row-major order) of a nested list of ranks."""
    if type(nested) is int:
        return (), (nested,)
    # A text is a sequence of texts, infinitely nested.
    nests = isinstance(nested, Sequence) and not isinstance(nested, str | bytes)
    parts = [_flatten(part) for part in cast("Sequence[Nested]", nested)] if nests else []
    if not parts or any(shape != parts[0][0] for shape, _ in parts):
        raise SbpValueError(
            f"the ranks {str(nested)[:60]} are no rectangular mesh",
            accepted="nested lists of equal length, such as [[0, 1], [2, 3]]",
        )
    return (len(parts), *parts[0][0]), tuple(rank for _, ranks in parts for rank in ranks)


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """A mesh of distinct ranks with named axes.

    Args:
        ranks: Nested lists of ranks, one level for each axis.
        axes: One name for each axis; `axis0`, `axis1`, ... if omitted.
        device: Kind of device of every rank: `cpu` or `cuda`.

    Raises:
        SbpValueError: the lists are not rectangular, a rank repeats, or axes do not match.
    """

    mesh_shape: tuple[int, ...]
    rank_list: tuple[int, ...]
    axes: tuple[str, ...]
    device: str
    #: Its hash, cached because it is used often; of numbers alone, so equal in all processes.
    _hash: int = field(repr=False, compare=False)

    def __init__(
        self, ranks: Sequence[Nested], axes: Sequence[str] | None = None, device: str = "cpu"
    ) -> None:
        # A single number, as a file may have it, is not a mesh.
        shape, flat = _flatten(ranks if isinstance(ranks, Sequence) else [])
        names = tuple(axes) if axes is not None else tuple(f"axis{i}" for i in range(len(shape)))
        if len(set(flat)) != len(flat) or not all(0 <= rank < MOST_RANKS for rank in flat):
            raise SbpValueError(
                f"ranks {list(flat)} repeat or are negative or too large",
                accepted=f"distinct ranks from 0 to {MOST_RANKS - 1}",
            )
        if len(names) != len(shape) or len(set(names)) != len(names):
            raise SbpValueError(
                f"axes {names} do not name the {len(shape)} axes of a mesh of shape {shape}",
                accepted="one distinct name for each axis",
            )
        object.__setattr__(self, "mesh_shape", shape)
        object.__setattr__(self, "rank_list", flat)
        object.__setattr__(self, "axes", names)
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "_hash", hash((shape, flat)))

    def __hash__(self) -> int:
        """Return a hash that is equal for equal meshes."""
        return self._hash

    @classmethod
    def grid(
        cls, mesh_shape: Sequence[int], axes: Sequence[str] | None = None, device: str = "cpu"
    ) -> Placement:
        """Return the mesh of `mesh_shape` over ranks 0, 1, 2, ... in row-major order."""
        ranks = iter(range(prod(mesh_shape)))

        def build(shape: Sequence[int]) -> Nested:
            return next(ranks) if not shape else [build(shape[1:]) for _ in range(shape[0])]

        nested = build(mesh_shape)
        assert not isinstance(nested, int), "a mesh has at least one axis"
        return cls(nested, axes, device)

    @property
    def ranks(self) -> Nested:
        """The ranks as nested lists."""
        flat = iter(self.rank_list)

        def build(shape: Sequence[int]) -> Nested:
            return next(flat) if not shape else [build(shape[1:]) for _ in range(shape[0])]

        return build(self.mesh_shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rank_list)

    @property
    def num_axes(self) -> int:
        """Number of mesh axes."""
        return len(self.mesh_shape)

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, Hashable) and rank in _positions(self)

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (rank, mesh coordinate) in row-major order."""
        grid = product(*(range(extent) for extent in self.mesh_shape))
        yield from zip(self.rank_list, grid, strict=True)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the mesh coordinate of a rank.

        Raises:
            SbpValueError: the rank is not in this mesh.
        """
        rest = _positions(self).get(rank)
        if rest is None:
            raise self._without(rank)
        coordinate: list[int] = []
        for extent in reversed(self.mesh_shape):
            rest, index = divmod(rest, extent)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a mesh coordinate."""
        index = 0
        for extent, part in zip(self.mesh_shape, coordinate, strict=True):
            index = index * extent + part
        return self.rank_list[index]

    def group(self, rank: int, *axes: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, in mesh order."""
        group = _group_of(self, axes).get(rank)
        if group is None:
            raise self._without(rank)
        return group

    def _without(self, rank: int) -> SbpValueError:
        return SbpValueError(
            f"rank {rank} is not in the mesh {self.ranks}",
            accepted=", ".join(map(str, self.rank_list)),
        )

    def groups(self, *axes: int) -> tuple[tuple[int, ...], ...]:
        """Return the distinct groups of ranks along some axes, in row-major order."""
        return _groups(self, axes)

    def submesh(self, axis: int, index: int) -> Placement:
        """Return the mesh at one index of an axis, without that axis.

        A mesh of one axis leaves a mesh of one rank and one axis, named `rank`.
        """
        ranks = tuple(rank for rank, at in self.coordinates() if at[axis] == index)
        shape = self.mesh_shape[:axis] + self.mesh_shape[axis + 1 :]
        names = self.axes[:axis] + self.axes[axis + 1 :]
        flat = iter(ranks)

        def build(extents: Sequence[int]) -> Nested:
            return next(flat) if not extents else [build(extents[1:]) for _ in range(extents[0])]

        nested = build(shape or (1,))
        assert not isinstance(nested, int), "a mesh has at least one axis"
        return Placement(nested, names or ("rank",), self.device)

    @classmethod
    def json_form(cls) -> JsonForm:
        """Return its JSON form: the fields that it was constructed from."""
        return JsonForm(
            _PlacementFields,
            lambda self: _PlacementFields(ranks=self.ranks, axes=self.axes, device=self.device),
            lambda parts: cls(parts.ranks, parts.axes, parts.device),
        )

    def __repr__(self) -> str:
        return f"Placement(ranks={self.ranks!r}, axes={self.axes!r}, device={self.device!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlacementFields:
    """The serialised fields of a placement."""

    ranks: Any
    axes: tuple[str, ...]
    device: str


@lru_cache(maxsize=1024)
def _groups(placement: Placement, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the result of `Placement.groups`, without computing every rank's group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in placement.coordinates():
        rest = tuple(part for axis, part in enumerate(at) if axis not in axes)
        groups.setdefault(rest, []).append(rank)
    return tuple(map(tuple, groups.values()))


@lru_cache(maxsize=1024)
def _positions(placement: Placement) -> Mapping[int, int]:
    """Return the place of each rank in row-major order."""
    return {rank: place for place, rank in enumerate(placement.rank_list)}


@lru_cache(maxsize=1024)
def _group_of(placement: Placement, axes: tuple[int, ...]) -> Mapping[int, tuple[int, ...]]:
    """Return the group of each rank along some axes."""
    return {rank: group for group in _groups(placement, axes) for rank in group}
