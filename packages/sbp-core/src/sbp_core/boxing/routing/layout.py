"""Number the states of the router's search, the nd-SBPs on one mesh, and compute their slices.

An entry is an int here (`encode`): `S(dim)` is its dim, `B` and the partials are negative. A
`Layout` has one row for each nd-SBP that a search may visit, in a fixed order, and numpy arrays of
everything that depends on the row alone. `intervals` and `covers` describe one split of one dim,
and are shared by all tensors that have a dim of that extent. Sets of mesh axes are bit masks (axis
0 is bit 0), ranks are positions in mesh order. This module knows no prices.

`Sizes` counts the elements of shards, and of the slices that ranks have in both of two states.
Where every split of every dim is even, one count holds for all such tensors: dims get the smallest
possible extent, and the whole tensor has `whole` elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from sbp_core.sbp import B, Broadcast, Partial, Sbp, Split

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

#: Codes of the entries that are not splits.
BROADCAST, SUM, MAX, MIN = -1, -2, -3, -4

_PARTIAL = {"sum": SUM, "max": MAX, "min": MIN}
_REDUCTION = {code: name for name, code in _PARTIAL.items()}

#: Stands for a missing step. Sums of a few of them do not overflow.
NEVER = 1 << 58

#: Lengths, or shares of an extent.
Factors = Ints | npt.NDArray[np.float64]

#: Pairs (position in the source mesh, position in the target mesh) of the ranks that are in both.
Shared = tuple[tuple[int, int], ...]


def encode(entry: Sbp) -> int:
    """Return the code of an entry."""
    if isinstance(entry, Split):
        return entry.dim
    return BROADCAST if isinstance(entry, Broadcast) else _PARTIAL[entry.reduction]


def decode(code: int) -> Sbp:
    """Return the entry of a code."""
    if code >= 0:
        return Split(code)
    return B if code == BROADCAST else Partial(_REDUCTION[code])


def coordinates(mesh_shape: tuple[int, ...]) -> Ints:
    """Return the mesh coordinate of each rank: shape (ranks, axes)."""
    grid = np.indices(mesh_shape, dtype=np.int64)
    return grid.reshape(len(mesh_shape), -1).T.copy()


@lru_cache(maxsize=256)
def numbers(mesh_shape: tuple[int, ...]) -> Ints:
    """Return each rank's row-major number among the axes of a mask: shape (2 ** axes, ranks)."""
    at = coordinates(mesh_shape)
    masks = np.arange(1 << len(mesh_shape))
    result = np.zeros((len(masks), len(at)), dtype=np.int64)
    for axis, extent in enumerate(mesh_shape):
        among = (masks >> axis & 1).astype(bool)
        result[among] = result[among] * extent + at[:, axis]
    return result


def num_ranks(mesh_shape: tuple[int, ...], mask: int) -> int:
    """Return the product of the extents of a mask's axes."""
    return prod(extent for axis, extent in enumerate(mesh_shape) if mask >> axis & 1)


@lru_cache(maxsize=1024)
def intervals(extent: int, mesh_shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return where the slices of a dim start and stop, by mask of the axes that split it, and rank.

    Returns:
        Two arrays of shape (2 ** axes, ranks).
    """
    at = coordinates(mesh_shape)
    masks = 1 << len(mesh_shape)
    start = np.zeros((masks, len(at)), dtype=np.int64)
    length = np.full((masks, len(at)), extent, dtype=np.int64)
    # Axes apply in order: each splits the slices that the axes before it left, for all masks that
    # have it at once. A balanced split gives the first `more` parts one element more:
    #
    #     10 in 4 parts: 3 3 2 2     part i starts at i * 2 + min(i, 2)
    for axis, parts in enumerate(mesh_shape):
        split = (np.arange(masks) >> axis & 1).astype(bool)
        base, more = length[split] // parts, length[split] % parts
        index = at[:, axis]
        start[split] += index * base + np.minimum(index, more)
        length[split] = base + (index < more)
    return start, start + length


def common_lengths(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> Ints:
    """Return the lengths of the intersections of two arrays of intervals, elementwise."""
    shared: Ints = np.minimum(one[1], other[1]) - np.maximum(one[0], other[0])
    np.maximum(shared, 0, out=shared)
    return shared


@lru_cache(maxsize=256)
def covers(extent: int, mesh_shape: tuple[int, ...], *, together: bool) -> Bools:
    """Return where the ranks of a group hold all that one of them needs, in one dim.

    Args:
        extent: Extent of the dim.
        mesh_shape: Shape of the mesh.
        together: Whether the answer is for all ranks together, or for each.

    Returns:
        By mask of the axes that split the dim before, mask of the axes among them along which the
        ranks of a group differ, mask of the axes that split the dim after, and rank (one answer for
        all if `together`): shape (2 ** axes, 2 ** axes, 2 ** axes, ranks or 1).
    """
    # `held` are the axes that split the dim before; the step works on `free`, some of them: there
    # the peers of a rank differ from it, and hold disjoint slices. So a rank finds all it needs in
    # its group if the parts of its new slice that its peers hold add up to that slice. An axis of
    # the group that does not split the dim gives copies of the same slice, and is left out. If all
    # axes that split it are free, the group holds the whole dim.
    masks = range(1 << len(mesh_shape))
    start, stop = (bound.reshape(-1, *mesh_shape) for bound in intervals(extent, mesh_shape))
    covered = np.ones((len(masks), len(masks), *start.shape), dtype=np.bool_)
    for held, free in product(masks, masks):
        if free != held and free & ~held == 0:
            places = [
                [slice(place, place + 1) for place in range(parts)]
                if free >> axis & 1
                else [slice(None)]
                for axis, parts in enumerate(mesh_shape)
            ]
            shared = np.zeros(start.shape, dtype=np.int64)
            # One peer of every rank at a time: its coordinate on the free axes is fixed, on the
            # other axes it is the rank's own.
            for peer in product(*places):
                shared += common_lengths((start[held][peer], stop[held][peer]), (start, stop))
            covered[held, free] = shared == stop - start
    covered = covered.reshape(len(masks), len(masks), len(masks), -1)
    if not together:
        return covered
    everywhere: Bools = np.all(covered, axis=3, keepdims=True)
    return everywhere


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The states of one mesh that a search may visit.

    Args:
        mesh_shape: Shape of the mesh.
        entries: The codes that each axis may have; the states are their product, in order.
        codes: The states, shape (states, axes).
        splits: Mask of the axes that split each dim, shape (states, dims).
        split, partial, sums, copied: Mask of the axes that are `S`, `P`, `P("sum")`, `B`; shape
            (states,).
        kinds: The reductions of a state: 1 for sum, 2 for max, 4 for min, added up.
        form: Number of a state's splits among `forms`: states that differ in `B` and `P` only
            share one.
        forms: `splits` of each form, shape (forms, dims).
    """

    mesh_shape: tuple[int, ...]
    entries: tuple[tuple[int, ...], ...]
    codes: Ints
    splits: Ints
    split: Ints
    partial: Ints
    sums: Ints
    copied: Ints
    kinds: Ints
    form: Ints
    forms: Ints

    @classmethod
    def of(
        cls, mesh_shape: tuple[int, ...], entries: tuple[tuple[int, ...], ...], num_dims: int
    ) -> Layout:
        """List the states."""
        codes = np.array(list(product(*entries)), dtype=np.int64).reshape(-1, len(mesh_shape))
        bits = 1 << np.arange(len(mesh_shape), dtype=np.int64)

        def mask(chosen: Bools) -> Ints:
            masks: Ints = (chosen * bits).sum(axis=1)
            return masks

        # Bit a of splits[state, dim] says that axis a splits the dim.
        splits = np.stack([mask(codes == dim) for dim in range(num_dims)], axis=1)
        # States of one form have the same splits. Forms are numbered by their codes as digits, in
        # which `B` and all partials are the digit 0.
        forms, form = np.unique(
            (np.maximum(codes, -1) + 1) @ (num_dims + 1) ** np.arange(len(mesh_shape)),
            return_inverse=True,
        )
        first = np.zeros(len(forms), dtype=np.int64)
        # Backwards, so that the first state of each form is written last.
        first[form[::-1]] = np.arange(len(codes))[::-1]
        return cls(
            mesh_shape,
            entries,
            codes,
            splits,
            split=mask(codes >= 0),
            partial=mask(codes <= SUM),
            sums=mask(codes == SUM),
            copied=mask(codes == BROADCAST),
            kinds=sum(
                ((codes == code).any(axis=1) * (1 << bit) for bit, code in enumerate(_REDUCTION)),
                np.zeros(len(codes), dtype=np.int64),
            ),
            form=form,
            forms=splits[first],
        )

    def index(self, codes: Sequence[int]) -> int:
        """Return the number of a state."""
        result = 0
        for entries, code in zip(self.entries, codes, strict=True):
            result = result * len(entries) + entries.index(code)
        return result

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The extents of a tensor's dims, and how elements are counted.

    Args:
        extents: By dim.
        whole: 0 to count elements; else all splits are even, and the unit is such that the tensor
            has `whole` elements. Any multiple of (source ranks x target ranks) is exact.
    """

    extents: tuple[int, ...]
    whole: int

    def factors(self, dim: int, lengths: Ints) -> Factors:
        """Return the factors of volumes that belong to lengths in one dim."""
        return lengths / self.extents[dim] if self.whole else lengths

    def volumes(self, factors: list[Factors]) -> Ints:
        """Return the elements of slices, from the factors of their lengths in each dim."""
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        if self.whole:
            # Shares such as 1/3 are not exact as floats; `whole` is chosen so that the result is an
            # integer, which rounding recovers.
            product = np.rint(product * self.whole)
        return product.astype(np.int64, copy=False)


def shard_volumes(layout: Layout, sizes: Sizes) -> Ints:
    """Return the elements of each rank's shard: shape (ranks, forms)."""
    # A shard is a box: its volume is the product of its lengths in each dim, and a length depends
    # only on the axes that split that dim. So a table of lengths for each dim serves all forms.
    factors = []
    for dim, extent in enumerate(sizes.extents):
        start, stop = intervals(extent, layout.mesh_shape)
        lengths = sizes.factors(dim, (stop - start).T)
        factors.append(lengths[:, layout.forms[:, dim]])
    return sizes.volumes(factors)


def overlaps(source: Layout, target: Layout, sizes: Sizes, ranks: tuple[Ints, Ints]) -> Ints:
    """Return the elements that ranks have in both of two forms.

    Args:
        source: The first layout.
        target: The second layout.
        sizes: Sizes of the tensor.
        ranks: The ranks in both: positions in the first, positions in the second.

    Returns:
        Shape (ranks in both, source forms, target forms).
    """
    factors = []
    for dim, extent in enumerate(sizes.extents):
        before, after = intervals(extent, source.mesh_shape), intervals(extent, target.mesh_shape)
        held = tuple(bound.T[ranks[0], :, None] for bound in before)
        wanted = tuple(bound.T[ranks[1], None, :] for bound in after)
        shared = common_lengths((held[0], held[1]), (wanted[0], wanted[1]))
        lengths = sizes.factors(dim, shared)
        factors.append(lengths.take(source.forms[:, dim], 1).take(target.forms[:, dim], 2))
    return sizes.volumes(factors)


@lru_cache(maxsize=1024)
def shared_places(before: tuple[int, ...], after: tuple[int, ...]) -> Shared:
    """Return the positions of the ranks that two meshes share, from their ranks in mesh order."""
    places = {rank: place for place, rank in enumerate(after)}
    return tuple((place, places[rank]) for place, rank in enumerate(before) if rank in places)


def positions(shared: Shared) -> tuple[Ints, Ints]:
    """Return the positions of shared ranks in the first mesh, and in the second."""
    pairs = np.array(shared, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
