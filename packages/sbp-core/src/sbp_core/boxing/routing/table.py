"""Tables of a search: what every single step between two states moves and holds, all at once.

Bytes are counted in elements. Where every split of every dim is even, a table holds for all such
tensors: then dims have extent 1 and the whole tensor is `whole` elements (`Sizes`). The definitions
are those of `boxing.slices` and `boxing.memory`, worked out here for all pairs of states together;
tests hold the two against each other. Assembled in `boxing.routing.tables`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import prod

import numpy as np

from sbp_core.boxing.memory import held_at_once
from sbp_core.boxing.routing.layout import (
    MAX,
    MIN,
    SUM,
    Bools,
    Ints,
    Layout,
    common_lengths,
    covers,
    intervals,
    num_ranks,
    number,
)
from sbp_core.boxing.step import StepKind

#: No such step. Sums of a few are still no overflow.
NEVER = 1 << 58

#: Elements of the arrays that are filled at once.
_AT_ONCE = 1 << 16

#: Kinds of steps within a placement, numbered as in `Within.kind`.
KINDS = (
    StepKind.LOCAL,
    StepKind.ALL_REDUCE,
    StepKind.REDUCE_SCATTER,
    StepKind.ALL_GATHER,
    StepKind.ALL_TO_ALL,
)


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

    def volumes(self, lengths: list[Ints]) -> Ints:
        """Return the elements of slices, from their lengths in each dim."""
        if not self.whole:
            exact = lengths[0]
            for length in lengths[1:]:
                exact = exact * length
            return exact
        share = lengths[0] / self.extents[0]
        for length, extent in zip(lengths[1:], self.extents[1:], strict=True):
            share = share * (length / extent)
        rounded: Ints = np.rint(share * self.whole).astype(np.int64)
        return rounded


@dataclass(frozen=True, slots=True)
class Transfers:
    """The `TRANSFER`s from the states of one layout to those of another, row by column.

    Args:
        elements: Moved between ranks; `NEVER` where there is no such step.
        memory: The most a rank holds, a lower bound: without what it packs to send.
    """

    elements: Ints
    memory: Ints


@dataclass(frozen=True, slots=True)
class Within:
    """The collectives and local steps between the states of one layout, row by column.

    Args:
        layout: The states.
        elements: Moved between ranks; `NEVER` where there is no such step.
        memory: The most a rank holds.
        kind: Number of the step's kind among `KINDS`.
        axes: Mask of the mesh axes of the step.
        transfers: The `TRANSFER`s between the same states.
        least: The fewest elements that any of these steps moves.
    """

    layout: Layout
    elements: Ints
    memory: Ints
    kind: Ints
    axes: Ints
    transfers: Transfers
    least: Ints


def shard_volumes(layout: Layout, sizes: Sizes) -> Ints:
    """Return the elements of each rank's shard: shape (ranks, forms)."""
    lengths = []
    for dim, extent in enumerate(sizes.extents):
        start, stop = intervals(extent, layout.mesh_shape)
        lengths.append((stop - start).T[:, layout.forms[:, dim]])
    return sizes.volumes(lengths)


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
    lengths = []
    for dim, extent in enumerate(sizes.extents):
        before, after = intervals(extent, source.mesh_shape), intervals(extent, target.mesh_shape)
        held = tuple(bound.T[ranks[0], :, None] for bound in before)
        wanted = tuple(bound.T[ranks[1], None, :] for bound in after)
        shared = common_lengths((held[0], held[1]), (wanted[0], wanted[1]))
        lengths.append(shared[:, source.forms[:, dim, None], target.forms[None, :, dim]])
    return sizes.volumes(lengths)


def positions(shared: Shared) -> tuple[Ints, Ints]:
    """Return the positions of shared ranks in the one mesh, and in the other."""
    pairs = np.array(shared, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def can_transfer(source: Layout, target: Layout) -> Bools:
    """Say which states one `TRANSFER` leads between; see `slices.can_transfer`."""
    before, after = source.kinds[:, None], target.kinds[None, :]
    single = (before & (before - 1)) == 0
    legal: Bools = (before == 0) | (single & ((after == 0) | (after == before)))
    return legal


def transfers(source: Layout, target: Layout, sizes: Sizes, shared: Shared) -> Transfers:
    """Return what every `TRANSFER` between two layouts moves and holds.

    States that differ in the reductions of their partials only are counted once; and of a state
    with `P("sum")`, only those axes and the slices count.

    Args:
        source: The states before.
        target: The states after; the same object if the placement is the same.
        sizes: Of the tensor.
        shared: The ranks that are in both meshes.
    """
    here, there = positions(shared)
    kept, held, wanted = (
        overlaps(source, target, sizes, (here, there)),
        shard_volumes(source, sizes),
        shard_volumes(target, sizes),
    )
    adds = target.sums > 0
    us, before = _classes(source.form, source.partial, 0 * source.sums)
    vs, after = _classes(target.form, np.where(adds, 0, target.partial), target.sums)
    takes, needs, share = _shares(source, us, target, vs, shared)
    fv, num_senders = target.form[vs], len(held)
    wants, all_shared = wanted[:, None, fv], len(there) == len(wanted)
    elements = np.empty((len(us), len(vs)), dtype=np.int64)
    memory = np.empty_like(elements)
    rows = max(1, _AT_ONCE // (len(vs) * len(wanted)))
    for first in range(0, len(us), rows):
        part = slice(first, first + rows)
        fu = source.form[us[part]]
        holds = held[:, fu]
        stays = kept[:, fu[:, None], fv[None, :]] * takes[:, share[part]]
        comes = needs[:, share[part]] * wants
        moved = comes.sum(axis=0) - stays.sum(axis=0)
        comes[there] -= stays
        comes[:, :, adds[vs]] = 0  # where the addends go is left to the exact count
        comes += wants
        comes[there] += holds[here, :, None]
        # The fullest of the senders holds no less than they do on average.
        total = comes[there].sum(axis=0) + moved
        total += (holds.sum(axis=0) - holds[here].sum(axis=0))[:, None]
        if all_shared:
            total += np.where(adds[vs], moved, 0)
        mean = -(-total // num_senders)
        elements[part] = moved
        memory[part] = np.maximum(np.maximum(mean, comes.max(axis=0)), holds.max(axis=0)[:, None])
    every = np.ix_(before, after)
    legal = can_transfer(source, target)
    return Transfers(np.where(legal, elements[every], NEVER), np.where(legal, memory[every], NEVER))


def _classes(*keys: Ints) -> tuple[Ints, Ints]:
    """Return one state of each class of equal keys, and the class of each state."""
    key = keys[0]
    for other in keys[1:]:
        key = key * (int(other.max()) + 1) + other
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first, inverse


def _shares(
    source: Layout, us: Ints, target: Layout, vs: Ints, shared: Shared
) -> tuple[Ints, Ints, Ints]:
    """Return, for classes of states, how much of a shard each target rank needs, and keeps.

    Returns:
        By share: how many times what a rank holds and wants is kept, shape (ranks in both, shares);
        how many times what it wants is needed, shape (target ranks, shares); and the share of each
        source class and target class.
    """
    meshes = (source.mesh_shape, target.mesh_shape)
    before = [(int(source.partial[u]), int(source.split[u])) for u in us]
    after = [(int(target.partial[v]), int(target.sums[v]), int(target.split[v])) for v in vs]
    one, other = dict.fromkeys(before), dict.fromkeys(after)
    found: dict[tuple[int, ...], int] = {}
    takes: list[Ints] = []
    needs: list[Ints] = []
    table = np.empty((len(one), len(other)), dtype=np.int64)
    for i, (mask, split) in enumerate(one):
        for j, (partial, sums, boxes) in enumerate(other):
            key = (mask, split, sums, boxes) if sums else (mask, partial)
            if key not in found:
                found[key] = len(takes)
                if sums:
                    taken, needed = _addends(*meshes, shared, mask, split, sums, boxes)
                else:
                    taken, needed = _values(*meshes, shared, mask, partial)
                takes.append(taken)
                needs.append(needed)
            table[i, j] = found[key]
    row = {key: at for at, key in enumerate(one)}
    column = {key: at for at, key in enumerate(other)}
    share = table[np.ix_([row[key] for key in before], [column[key] for key in after])]
    return np.stack(takes, axis=1), np.stack(needs, axis=1), share


@lru_cache(maxsize=4096)
def _values(
    ms: tuple[int, ...], mt: tuple[int, ...], shared: Shared, mask: int, partial: int
) -> tuple[Ints, Ints]:
    """Return whether a rank takes its own term, and how many terms it takes; no `P("sum")`.

    Args:
        ms: Mesh shape of the source.
        mt: Mesh shape of the target.
        shared: Ranks in both.
        mask: The axes that are `P` before.
        partial: The axes that are `P` after.
    """
    here, there = positions(shared)
    count, repeats = num_ranks(ms, mask), num_ranks(mt, partial)
    part, term = number(mt, partial), number(ms, mask)[here]
    first = part[there]
    takes = np.where(first < count, term % repeats == first, term == first % count)
    return takes.astype(np.int64), np.maximum(1, (count - part + repeats - 1) // repeats)


@lru_cache(maxsize=4096)
def _addends(
    ms: tuple[int, ...],
    mt: tuple[int, ...],
    shared: Shared,
    mask: int,
    split: int,
    sums: int,
    boxes: int,
) -> tuple[Ints, Ints]:
    """Return how many copies of what a rank holds need not move, and what counts as needed.

    A slice of one source partial within one slice of the target is a cell; all ranks that have it
    have it whole, and it is added into the target partial where most have it.

    Args:
        ms: Mesh shape of the source.
        mt: Mesh shape of the target.
        shared: Ranks in both.
        mask: The axes that are `P` before.
        split: The axes that are `S` before.
        sums: The axes that are `P("sum")` after.
        boxes: The axes that are `S` after.
    """
    here, there = positions(shared)
    home = number(mt, sums)
    cell = number(ms, mask | split)[here] * prod(mt) + number(mt, boxes)[there]
    _, first, cell = np.unique(cell, return_index=True, return_inverse=True)
    homes = np.zeros((len(first), int(home.max()) + 1), dtype=np.int64)
    np.add.at(homes, (cell, home[there]), 1)
    saved = np.zeros(len(here), dtype=np.int64)
    saved[first] = homes.max(axis=1, initial=0)
    return saved, num_ranks(ms, mask) * (home == 0)


class _Collectives:
    """The tables of `Within` while they are filled, one set of mesh axes at a time."""

    def __init__(self, layout: Layout, sizes: Sizes, kept: Ints) -> None:
        self.layout, self.sizes, self.kept = layout, sizes, kept
        self.volumes = shard_volumes(layout, sizes)
        shape = (len(layout), len(layout))
        self.elements = np.full(shape, NEVER, dtype=np.int64)
        self.memory = np.full(shape, NEVER, dtype=np.int64)
        self.kind = np.zeros(shape, dtype=np.int64)
        self.axes = np.zeros(shape, dtype=np.int64)

    def fill(self) -> None:
        """Fill in all steps; those on fewer axes first."""
        layout = self.layout
        num_axes = len(layout.mesh_shape)
        radix = np.array([64**axis for axis in range(num_axes)], dtype=np.int64)
        for size in range(1, num_axes + 1):
            for axes in combinations(range(num_axes), size):
                mask = sum(1 << axis for axis in axes)
                others = [axis for axis in range(num_axes) if axis not in axes]
                rest = (layout.codes[:, others] + 8) @ radix[others]
                if num_ranks(layout.mesh_shape, mask) > 1:
                    self._on(mask, rest)
                elif size == 1:
                    everything = np.ones(len(layout), dtype=np.bool_)
                    self._add(StepKind.LOCAL, mask, rest, everything, everything)

    def _on(self, mask: int, rest: Ints) -> None:
        """Fill in the steps on the axes of a mask between states that agree on all others."""
        layout = self.layout
        splits = (layout.split & mask) == mask
        copies = (layout.copied & mask) == mask
        for reduced in self._reducible(mask):
            self._add(StepKind.ALL_REDUCE, mask, rest, reduced, copies)
            self._add(StepKind.REDUCE_SCATTER, mask, rest, reduced, splits)
        self._add(StepKind.ALL_GATHER, mask, rest, splits, copies)
        self._add(StepKind.ALL_TO_ALL, mask, rest, splits, splits)
        if mask & (mask - 1) == 0:
            partial, sums = (layout.partial & mask) == mask, (layout.sums & mask) == mask
            self._add(StepKind.LOCAL, mask, rest, copies, splits | partial)
            # Zeros around a slice are neutral for sums only.
            self._add(StepKind.LOCAL, mask, rest, splits, sums)

    def _reducible(self, mask: int) -> Iterator[Bools]:
        """Yield the states whose axes of a mask are `P` and can be reduced, by reduction.

        Max over a sum is no sum over a max: inner axes are reduced first.
        """
        codes = self.layout.codes
        axes = [axis for axis in range(codes.shape[1]) if mask >> axis & 1]
        inner = codes[:, axes[0] :]
        for code in (SUM, MAX, MIN):
            chosen = (codes[:, axes] == code).all(axis=1)
            yield chosen & ((inner == code) | (inner > SUM)).all(axis=1)

    def _add(self, kind: StepKind, mask: int, rest: Ints, before: Bools, after: Bools) -> None:
        layout = self.layout
        us, vs = np.flatnonzero(before), np.flatnonzero(after)
        row, column = np.nonzero(rest[us, None] == rest[None, vs])
        us, vs = us[row], vs[column]
        new = (self.elements[us, vs] == NEVER) & (us != vs)
        us, vs = us[new], vs[new]
        if not len(us):
            return
        if num_ranks(layout.mesh_shape, mask) > 1:
            possible = self._is_realisable(us, vs, mask)
            if kind is StepKind.LOCAL:
                pads = (layout.split[us] & mask) > 0
                possible &= ~pads | self._keeps_all(us, vs)
            us, vs = us[possible], vs[possible]
        self.elements[us, vs] = self._moved(kind, mask, us, vs)
        self.memory[us, vs] = self._held(kind, us, vs)
        self.kind[us, vs] = KINDS.index(kind)
        self.axes[us, vs] = mask

    def _is_realisable(self, us: Ints, vs: Ints, mask: int) -> Bools:
        """Say where each group holds all that its ranks want; see `slices.is_realisable`."""
        layout = self.layout
        width = 1 if self.sizes.whole else len(self.volumes)
        possible = np.ones((len(us), width), dtype=np.bool_)
        for dim, extent in enumerate(self.sizes.extents):
            held, wanted = layout.splits[us, dim], layout.splits[vs, dim]
            table = covers(extent, layout.mesh_shape, together=bool(self.sizes.whole))
            covered: Bools = table[held, held & mask, wanted]
            possible &= covered
        if not self.sizes.whole:
            nothing: Bools = self.volumes[:, layout.form[vs]].T == 0
            possible |= nothing
        everywhere: Bools = np.logical_and.reduce(possible, axis=1)
        return everywhere

    def _keeps_all(self, us: Ints, vs: Ints) -> Bools:
        before, after = self.layout.form[us], self.layout.form[vs]
        keeps: Bools = (self.kept[:, before, after] == self.volumes[:, before]).all(axis=0)
        return keeps

    def _moved(self, kind: StepKind, mask: int, us: Ints, vs: Ints) -> Ints | int:
        before, after = self.layout.form[us], self.layout.form[vs]
        group = num_ranks(self.layout.mesh_shape, mask)
        totals: Ints = self.volumes.sum(axis=0)
        if kind is StepKind.LOCAL:
            return 0
        if kind is StepKind.ALL_REDUCE:
            totals = 2 * totals
        if kind in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER):
            reduced: Ints = (group - 1) * (totals[before] // group)
            return reduced
        moved: Ints = totals[after] - self.kept[:, before, after].sum(axis=0)
        return moved

    def _held(self, kind: StepKind, us: Ints, vs: Ints) -> Ints:
        form = self.layout.form
        before, after = self.volumes[:, form[us]], self.volumes[:, form[vs]]
        kept = self.kept[:, form[us], form[vs]]
        fullest: Ints = held_at_once(kind, before, after, before - kept, after - kept).max(axis=0)
        return fullest


def within(
    mesh_shape: tuple[int, ...], entries: tuple[tuple[int, ...], ...], sizes: Sizes
) -> Within:
    """Return the steps within one placement.

    Args:
        mesh_shape: Of the placement.
        entries: Codes that each axis may have.
        sizes: Of the tensor.
    """
    layout = Layout.of(mesh_shape, entries, len(sizes.extents))
    shared = tuple((rank, rank) for rank in range(prod(mesh_shape)))
    filling = _Collectives(layout, sizes, overlaps(layout, layout, sizes, positions(shared)))
    filling.fill()
    direct = transfers(layout, layout, sizes, shared)
    return Within(
        layout,
        filling.elements,
        filling.memory,
        filling.kind,
        filling.axes,
        direct,
        np.minimum(filling.elements, direct.elements),
    )
