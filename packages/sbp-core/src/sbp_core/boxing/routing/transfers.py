"""Compute the bytes and memory of `TRANSFER`s, the boxing steps of point-to-point messages.

`step_tables` and `boxing.price` use them. The definitions are those of `boxing.slices` and
`boxing.memory`, computed here for all pairs of states together (`transfers`), or for all pairs of
ranks together (`messages`: how much each rank sends to each other rank, without its pieces; ranks
are positions in their meshes). Tests compare them with each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np

from sbp_core.boxing.routing.layout import (
    BROADCAST,
    NEVER,
    SUM,
    Bools,
    Factors,
    Ints,
    Layout,
    Shared,
    Sizes,
    common_lengths,
    intervals,
    num_ranks,
    numbers,
    positions,
    shard_volumes,
)


@dataclass(frozen=True, slots=True)
class Transfers:
    """The `TRANSFER`s from the states of one layout to the states of another.

    States that differ only in the reductions of their partials are in one class; for a state after
    with `P("sum")`, only those axes and the slices count.

    Args:
        elements: Elements moved between ranks, by class of the state before (row) and after
            (column).
        memory: A lower bound of the most that a rank holds, likewise: without its packed messages.
        before: Class of each state before.
        after: Class of each state after.
        legal: Whether there is such a step, by state.
    """

    elements: Ints
    memory: Ints
    before: Ints
    after: Ints
    legal: Bools

    def moved(self, us: Ints, vs: Ints) -> Ints:
        """Return the elements moved between some states; `NEVER` where there is no such step."""
        return self._between(self.elements, us, vs)

    def held(self, us: Ints, vs: Ints) -> Ints:
        """Return the most elements that a rank holds between some states, likewise."""
        return self._between(self.memory, us, vs)

    def _between(self, table: Ints, us: Ints, vs: Ints) -> Ints:
        # The table has one row and column for each class; numpy spreads it over the given states.
        found = table.take(self.before[us], axis=0).take(self.after[vs], axis=1)
        legal = self.legal.take(us, axis=0).take(vs, axis=1)
        np.copyto(found, NEVER, where=~legal)
        return found


def can_transfer(source: Layout, target: Layout) -> Bools:
    """Return between which states one `TRANSFER` leads; see `slices.can_transfer`."""
    kinds = np.arange(8)  # few: looked up for all states
    before, after = kinds[:, None], kinds
    # The rules of `slices.can_transfer` on masks of reductions: no partials before, and any after;
    # or partials of one kind before, and after none or of that kind only.
    single = (before & (before - 1)) == 0
    legal = (before == 0) | (single & ((after == 0) | (after == before)))
    every: Bools = legal.take(source.kinds, axis=0).take(target.kinds, axis=1)
    return every


def transfers(
    source: Layout, target: Layout, sizes: Sizes, shared: Shared, kept: Ints
) -> Transfers:
    """Return the elements that every `TRANSFER` between two layouts moves and holds.

    Args:
        source: The states before.
        target: The states after; the same object if the placement is the same.
        sizes: Sizes of the tensor.
        shared: The ranks in both meshes.
        kept: Their `overlaps`.
    """
    here, there = positions(shared)
    held, wanted = shard_volumes(source, sizes), shard_volumes(target, sizes)
    # The elements of a transfer depend on slices and on which axes are partial. The table has one
    # state of each class, which is many times smaller than a table of all pairs of states.
    us, before = _classes(source.form, source.partial)
    # In order of `sums`: states without any come first.
    vs, after = _classes(target.sums, target.form, np.where(target.sums > 0, 0, target.partial))
    known = int((target.sums[vs] == 0).sum())
    # The moved elements are a product of the sizes of slices and how often each is needed:
    #
    #     comes    for each target rank   its shard, once for each term of it that it has to add
    #     stays    for each common rank   the part of that which it already has
    #
    # so all is counted by forms of slices (`kept`) times shares of terms (`takes`, `needs`).
    takes, needs, row, column = _shares(source, us, target, vs, shared)
    wants, elsewhere = wanted[:, target.form[vs]], np.delete(np.arange(len(wanted)), there)
    elements, memory = np.empty((2, len(us), len(vs)), dtype=np.int64)
    # Not all at once: arrays by rank, state before and state after take more memory than the result
    # by a factor of the number of ranks.
    for share in range(takes.shape[1]):
        part = np.flatnonzero(row == share)
        forms = source.form[us[part]]
        stays = kept.take(forms, axis=1).take(target.form[vs], axis=2)
        stays *= takes[:, share].take(column, axis=1)[:, None]
        comes = needs[:, share].take(column, axis=1) * wants
        stayed = stays.sum(axis=0)
        moved = comes.sum(axis=0) - stayed
        for uncertain in (comes, stays):  # the place of addends is left to the exact count
            uncertain[..., known:] = 0
        # From here on `comes` is all that a target rank holds besides its shard from before: terms
        # as they arrive, and the shard that they become.
        comes += wants
        holds = held[:, forms]
        full = comes[there, None] - stays
        full += holds[here, :, None]
        # The fullest of the senders holds no less than the average sender. `held_at_once` counts
        # packed messages, too. They are not known by rank here, but their sum is `moved`.
        total = moved + comes[there].sum(axis=0) + holds.sum(axis=0)[:, None]
        total[:, :known] -= stayed[:, :known]
        if not len(elsewhere):
            total[:, known:] += moved[:, known:]
        elements[part] = moved
        memory[part] = reduce(
            np.maximum,
            (
                full.max(axis=0, initial=0),
                comes[elsewhere].max(axis=0, initial=0),
                holds.max(axis=0)[:, None],
                -(-total // len(held)),
            ),
        )
    return Transfers(elements, memory, before, after, can_transfer(source, target))


def _classes(*keys: Ints) -> tuple[Ints, Ints]:
    """Return one state of each class of equal keys, and the class of each state."""
    key = keys[0]
    for other in keys[1:]:
        key = key * (int(other.max()) + 1) + other
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def _shares(
    source: Layout, us: Ints, target: Layout, vs: Ints, shared: Shared
) -> tuple[Ints, Ints, Ints, Ints]:
    """Return, for classes of states, how much of a shard each target rank needs, and keeps.

    Returns:
        How many times a slice that a rank has and needs is kept, shape (ranks in both, source
        shares, target shares); how many times a needed slice is needed, likewise for target ranks;
        the share of each of `us`, and of each of `vs`.
    """
    here, there = positions(shared)
    ns, nt = numbers(source.mesh_shape), numbers(target.mesh_shape)
    first, row = _classes(source.partial[us], source.split[us])
    partial, split = source.partial[us[first]], source.split[us[first]]
    first, column = _classes(target.partial[vs], target.sums[vs], target.split[vs])
    parts, sums, boxes = (of[vs[first]] for of in (target.partial, target.sums, target.split))
    counts = ns.max(axis=1)[partial, None] + 1
    takes, needs = _values(ns[partial].T[here], counts, nt[parts].T, there)
    adds = np.flatnonzero(sums)
    homes = nt[sums[adds]].T[:, None]
    cells = ns[partial | split].T[here, :, None] * nt.shape[1] + nt[boxes[adds]].T[there, None]
    takes[..., adds] = _addends(cells, homes[there])
    needs[..., adds] = counts * (homes == 0)
    return takes, needs, row, column


def _values(terms: Ints, counts: Ints, parts: Ints, there: Ints) -> tuple[Ints, Ints]:
    """Return whether ranks take their own terms, and how many terms they take; not for `P("sum")`.

    Args:
        terms: The term that a rank has, shape (ranks in both, source shares).
        counts: Number of terms, shape (source shares, 1).
        parts: The target partial that a rank has, shape (target ranks, target shares).
        there: The target ranks that are in both.

    Returns:
        Shape (ranks in both, source shares, target shares), and the same with target ranks.
    """
    repeats = parts.max(axis=0) + 1
    own, parts = terms[:, :, None], parts[:, None]
    part = parts[there]
    takes = np.where(part < counts, own % repeats == part, own == part % counts)
    return takes.astype(np.int64), np.maximum(1, (counts - parts + repeats - 1) // repeats)


def _addends(cells: Ints, homes: Ints) -> Ints:
    """Return how many copies that ranks hold need not move to a target that is `P("sum")`.

    A cell is a slice of one source partial within one slice of the target. All ranks that have it
    have it whole, and it is added into the target partial in which most of them are. Those copies
    are counted at one of the ranks.

    Args:
        cells: The cell that a rank has, shape (ranks in both, source shares, target shares).
        homes: The target partial that it has, shape (ranks in both, 1, target shares).
    """
    num_cells, num_homes = (int(of.max(initial=0)) + 1 for of in (cells, homes))
    shares = np.arange(prod(cells.shape[1:])).reshape(cells.shape[1:])
    keys, first, copies = np.unique(
        (shares * num_cells + cells) * num_homes + homes, return_index=True, return_counts=True
    )
    # The keys are sorted: keys of one cell follow each other, one for each target partial that has
    # a copy. The largest count of each run is saved.
    start = np.flatnonzero(np.diff(keys // num_homes, prepend=-1))
    saved = np.zeros(cells.size, dtype=np.int64)
    saved[first[start]] = np.maximum.reduceat(copies, start)
    return saved.reshape(cells.shape)


@dataclass(frozen=True, slots=True)
class End:
    """The source or the target of a transfer, in codes.

    Args:
        mesh_shape: Shape of the mesh.
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
        sizes: Sizes of the tensor.
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
    # Everything below is by (source rank, target rank). A rank's number among some mesh axes
    # identifies its data: among `P` axes its term, among `P` and `S` axes its tile, among `B` axes
    # its copy of that tile.
    #
    # Receivers take turns among the copies of a tile, except receivers that have the tile.
    tile, term = ns[source.partial | source.split], ns[source.partial]
    copied = source.mask(BROADCAST)
    turn = np.arange(nt.shape[1]) % num_ranks(source.mesh_shape, copied)
    own = np.full(nt.shape[1], -1)
    own[there] = tile[here]
    sends = (ns[copied][:, None] == turn) & (tile[:, None] != own)
    sums = target.mask(SUM)
    if sums:
        # A term is added in the target partial that already has most copies of it (`homes` in
        # `slices._Tiles`): `saved` counts them by (tile, box, target partial). The first of equals
        # in turn from the number of the term wins, so the columns are put in that order before
        # `argmax`, which takes the first.
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
