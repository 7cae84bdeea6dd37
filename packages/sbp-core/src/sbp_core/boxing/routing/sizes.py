"""How the router counts: elements of shards, and of slices that ranks have in both of two states.

Where every split of every dim is even, a count holds for all such tensors: then dims have as small
an extent as can be and the whole tensor is `whole` elements (`Sizes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sbp_core.boxing.routing.layout import Ints, Layout, common_lengths, intervals

#: No such step. Sums of a few are still no overflow.
NEVER = 1 << 58

#: Lengths, or shares of an extent.
Factors = Ints | npt.NDArray[np.float64]

#: Pairs (position in the source mesh, position in the target mesh) of the ranks that are in both.
Shared = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The extents of a tensor's dims, and how elements are counted.

    Args:
        extents: By dim.
        whole: 0 to count elements; else the splits are all even, and elements are so large that the
            tensor has `whole` of them. Any multiple of (source ranks x target ranks) is exact.
    """

    extents: tuple[int, ...]
    whole: int

    def factors(self, dim: int, lengths: Ints) -> Factors:
        """Return what lengths in one dim contribute to volumes."""
        return lengths / self.extents[dim] if self.whole else lengths

    def volumes(self, factors: list[Factors]) -> Ints:
        """Return the elements of slices, from the factors of their lengths in each dim."""
        product = factors[0]
        for factor in factors[1:]:
            product = product * factor
        if self.whole:
            # Shares such as 1/3 are not exact as floats; `whole` is chosen so that the result is an
            # integer, which rounding finds again.
            product = np.rint(product * self.whole)
        return product.astype(np.int64, copy=False)


def shard_volumes(layout: Layout, sizes: Sizes) -> Ints:
    """Return the elements of each rank's shard: shape (ranks, forms)."""
    # A shard is a box: its volume is the product of its lengths in each dim, and a length depends
    # on which axes split that dim only. So a table of lengths for each dim is enough for all forms.
    factors = []
    for dim, extent in enumerate(sizes.extents):
        start, stop = intervals(extent, layout.mesh_shape)
        lengths = sizes.factors(dim, (stop - start).T)
        factors.append(lengths[:, layout.forms[:, dim]])
    return sizes.volumes(factors)


def overlaps(source: Layout, target: Layout, sizes: Sizes, ranks: tuple[Ints, Ints]) -> Ints:
    """Return the elements that ranks have in both of two forms.

    Args:
        source: The one layout.
        target: The other.
        sizes: Of the tensor.
        ranks: The ranks that both have: positions in the one, positions in the other.

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
    """Return where the ranks are that two meshes share, from their ranks in mesh order."""
    places = {rank: place for place, rank in enumerate(after)}
    return tuple((place, places[rank]) for place, rank in enumerate(before) if rank in places)


def positions(shared: Shared) -> tuple[Ints, Ints]:
    """Return the positions of shared ranks in the one mesh, and in the other."""
    pairs = np.array(shared, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
