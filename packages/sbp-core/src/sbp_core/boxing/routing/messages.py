"""The messages of one `TRANSFER`: how much each rank sends each other one, without its pieces.

The rules are those of `slices.transfer_pieces`, worked out here for all pairs of ranks together;
tests hold the two against each other. Ranks are positions in their meshes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp_core.boxing.routing.layout import (
    BROADCAST,
    SUM,
    Ints,
    common_lengths,
    intervals,
    num_ranks,
    numbers,
)
from sbp_core.boxing.routing.sizes import Factors, Sizes


@dataclass(frozen=True, slots=True)
class End:
    """The source or the target of a transfer, in codes.

    Args:
        mesh_shape: Of the mesh.
        codes: The entry of each axis.
    """

    mesh_shape: tuple[int, ...]
    codes: tuple[int, ...]

    def mask(self, *codes: int) -> int:
        """Return the mask of the axes that have one of some codes."""
        return sum(1 << axis for axis, code in enumerate(self.codes) if code in codes)

    @property
    def split(self) -> int:
        """The mask of the axes that are `S`."""
        return self.mask(*(code for code in self.codes if code > BROADCAST))

    @property
    def partial(self) -> int:
        """The mask of the axes that are `P`."""
        return self.mask(*(code for code in self.codes if code < BROADCAST))


def messages(sizes: Sizes, source: End, target: End, shared: tuple[Ints, Ints]) -> Ints:
    """Return the elements that each source rank sends each target rank.

    Args:
        sizes: Of the tensor.
        source: The state before.
        target: The state after.
        shared: Positions of the ranks in both: in the source mesh, in the target mesh.

    Returns:
        Shape (source ranks, target ranks); 0 from a rank to itself.
    """
    here, there = shared
    ns, nt = numbers(source.mesh_shape), numbers(target.mesh_shape)
    factors: list[Factors] = []
    for dim, extent in enumerate(sizes.extents):
        held = [bound[source.mask(dim), :, None] for bound in intervals(extent, source.mesh_shape)]
        wanted = [bound[target.mask(dim)] for bound in intervals(extent, target.mesh_shape)]
        lengths = common_lengths((held[0], held[1]), (wanted[0], wanted[1]))
        factors.append(sizes.factors(dim, lengths))
    # Everything below is by (source rank, target rank). A rank's number among some mesh axes says
    # what it has: among `P` axes its term, among `P` and `S` axes its tile, among `B` axes which of
    # the copies of that tile.
    #
    # Receivers take turns among the copies of a tile, but for those who have the tile.
    tile, term = ns[source.partial | source.split], ns[source.partial]
    copied = source.mask(BROADCAST)
    turn = np.arange(nt.shape[1]) % num_ranks(source.mesh_shape, copied)
    own = np.full(nt.shape[1], -1)
    own[there] = tile[here]
    sends = (ns[copied][:, None] == turn) & (tile[:, None] != own)
    sums = target.mask(SUM)
    if sums:
        # A term is added in the target partial where most copies of it are already (`homes` in
        # `slices._Tiles`): `saved` counts them by (tile, box, target partial). The first of equals
        # in turn from the number of the term wins, which is why the columns are put in that order
        # before `argmax`, which takes the first.
        home, box = nt[sums], nt[target.split]
        saved = np.zeros((tile.max() + 1, box.max() + 1, home.max() + 1), dtype=np.int64)
        np.add.at(saved, (tile[here], box[there], home[there]), 1)
        turns = (term[:, None] + np.arange(saved.shape[2])) % saved.shape[2]
        saved_in_turn = np.take_along_axis(saved[tile], turns[:, None, :], axis=2)
        homes = np.take_along_axis(turns, saved_in_turn.argmax(axis=2), axis=1)
        sends &= homes[:, box] == home
    else:
        count = num_ranks(source.mesh_shape, source.partial)
        repeats = num_ranks(target.mesh_shape, target.partial)
        part, term = nt[target.partial], term[:, None]
        sends &= np.where(part < count, term % repeats == part, term == part % count)
    elements: Ints = sizes.volumes(factors) * sends
    return elements
