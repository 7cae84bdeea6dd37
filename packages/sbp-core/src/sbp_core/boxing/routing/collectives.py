"""Compute the bytes and memory of every collective and local step between nd-SBPs on one mesh.

They become part of `step_tables`, in which the router searches. The definitions are those of
`boxing.slices` and `boxing.memory`, computed here for all pairs of states together; tests compare
the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np

from sbp_core.boxing.memory import held_at_once
from sbp_core.boxing.routing.layout import (
    BROADCAST,
    NEVER,
    SUM,
    Bools,
    Ints,
    Layout,
    Sizes,
    covers,
    num_ranks,
    numbers,
    shard_volumes,
)
from sbp_core.boxing.step import StepKind

#: Kinds of steps within a placement, numbered as in `Collectives.kind`.
KINDS = (
    StepKind.LOCAL,
    StepKind.ALL_REDUCE,
    StepKind.REDUCE_SCATTER,
    StepKind.ALL_GATHER,
    StepKind.ALL_TO_ALL,
)
_LOCAL = KINDS.index(StepKind.LOCAL)

#: Kind of the step from the entries on its axes before (0 is anything else, `P` that can be
#: reduced, `S`, `B`) to the entries after (anything else, `S`, `B`, `P("sum")`, another `P`); -1 if
#: there is none. Zeros around a slice are neutral for sums only. Local steps take one axis.
_KIND = np.array([[-1, -1, -1, -1, -1], [-1, 2, 1, -1, -1], [-1, 4, 3, 0, -1], [-1, 0, -1, 0, 0]])


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives and local steps between the states of one layout.

    There is at most one between two states: the step on the fewest axes. Steps are numbered; number
    0 stands for none.

    Args:
        number: Number of the step from each state (row) to each other (column).
        elements: Elements moved between ranks, by number; `NEVER` for none.
        memory: The most elements that a rank holds, by number.
        kind: Index of the step's kind in `KINDS`.
        axes: Mask of the mesh axes of the step.
    """

    number: Ints
    elements: Ints
    memory: Ints
    kind: Ints
    axes: Ints


def collectives(layout: Layout, sizes: Sizes, kept: Ints) -> Collectives:
    """Return the collectives and local steps of a layout.

    Args:
        layout: The states.
        sizes: Sizes of the tensor.
        kept: The `overlaps` of the layout with itself.
    """
    return _CollectiveTable(layout, sizes, kept).all()


class _CollectiveTable:
    """The steps of one layout while they are found, one set of mesh axes at a time."""

    def __init__(self, layout: Layout, sizes: Sizes, kept: Ints) -> None:
        self.layout, self.sizes, self.kept = layout, sizes, kept
        self.volumes = shard_volumes(layout, sizes)
        self.number: Ints = np.zeros((len(layout), len(layout)), dtype=np.int64)
        self.num_steps = 0

    def all(self) -> Collectives:
        """Return all steps; between the same states, the step on the fewest axes."""
        num_axes = len(self.layout.mesh_shape)
        none = (np.zeros(1, dtype=np.int64),) * 4
        found = [none] + [
            self._on(axes)
            for size in range(1, num_axes + 1)
            for axes in combinations(range(num_axes), size)
        ]
        us, vs, kinds, axes = (np.concatenate(of) for of in zip(*found, strict=True))
        elements, memory = np.full((2, len(us)), NEVER, dtype=np.int64)
        for number, kind in enumerate(KINDS):
            at = 1 + np.flatnonzero(kinds[1:] == number)
            elements[at], memory[at] = self._count(kind, us[at], vs[at], axes[at])
        return Collectives(self.number, elements, memory, kinds, axes)

    def _on(self, axes: tuple[int, ...]) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the steps on some axes: states before, states after, kinds, masks of axes."""
        layout = self.layout
        mask = sum(1 << axis for axis in axes)
        moves = num_ranks(layout.mesh_shape, mask) > 1
        before, after = self._roles(axes)
        if not moves:  # an axis of one rank: its entry means nothing
            before = after = np.ones(len(layout), dtype=np.int64)
        # A step changes entries on `axes` only, so it leads between states with equal entries on
        # all other axes. States are numbered like an array with one dim for each mesh axis; with
        # the dims of `axes` moved last, each row has such states. With 2 axes of 3 entries each,
        # on axis 0:
        #
        #     0 1 2                          0 3 6
        #     3 4 5   ->  moved and cut ->   1 4 7      steps are between two states of a row
        #     6 7 8                          2 5 8
        grid = np.arange(len(layout)).reshape(*map(len, layout.entries))
        alike = np.moveaxis(grid, axes, range(-len(axes), 0))
        alike = alike.reshape(-1, prod(len(layout.entries[axis]) for axis in axes))
        first, last = (role[alike].any(axis=0) for role in (before, after))
        # Every pair within a row, except columns that can never be an end of a step.
        us = alike[:, first].repeat(last.sum(), axis=1).ravel()
        vs = alike[:, None, last].repeat(first.sum(), axis=1).ravel()
        kind = _KIND[before[us], after[vs]] if moves else np.full(len(us), _LOCAL)
        # One step is enough between two states, and sets of fewer axes come first.
        new = (kind >= 0) & (us != vs) & (self.number[us, vs] == 0)
        if len(axes) > 1:
            new &= kind != _LOCAL
        us, vs, kind = us[new], vs[new], kind[new]
        if moves:
            possible = self._is_realisable(us, vs, mask)
            # A split that becomes P(sum) locally: a rank fills the rest of its shard with zeros.
            pads = np.flatnonzero(((layout.split[us] & mask) > 0) & (kind == _LOCAL))
            before, after = layout.form[us[pads]], layout.form[vs[pads]]
            keeps_all = self.kept[:, before, after] == self.volumes[:, before]
            possible[pads] &= keeps_all.all(axis=0)
            us, vs, kind = us[possible], vs[possible], kind[possible]
        self.number[us, vs] = np.arange(len(us)) + 1 + self.num_steps
        self.num_steps += len(us)
        return us, vs, kind, np.full(len(us), mask)

    def _roles(self, axes: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Return the role of each state's entries on some axes, numbered as in `_KIND`.

        A max over a sum is not a sum over a max: inner axes are reduced first.
        """
        codes = self.layout.codes
        chosen, inner = codes[:, axes], codes[:, axes[0] :]
        splits, copies = (chosen >= 0).all(axis=1), (chosen == BROADCAST).all(axis=1)
        first = chosen[:, 0]
        alike = (chosen == first[:, None]).all(axis=1) & (first <= SUM)
        reduced = alike & ((inner == first[:, None]) | (inner > SUM)).all(axis=1)
        before = 1 * reduced + 2 * splits + 3 * copies
        after = 1 * splits + 2 * copies + 3 * (alike & (first == SUM)) + 4 * (alike & (first < SUM))
        return before, after

    def _is_realisable(self, us: Ints, vs: Ints, mask: int) -> Bools:
        """Return where each group holds all that its ranks need; see `slices.is_realisable`."""
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

    def _count(self, kind: StepKind, us: Ints, vs: Ints, axes: Ints) -> tuple[Ints | int, Ints]:
        """Return the elements that steps of one kind move and hold."""
        u, v = self.layout.form[us], self.layout.form[vs]
        before, after, kept = self.volumes[:, u], self.volumes[:, v], self.kept[:, u, v]
        # All steps of the kind at once: by rank (rows) and step (columns).
        held = held_at_once(kind, before, after, before - kept, after - kept).max(axis=0)
        if kind is StepKind.LOCAL:
            return 0, held
        if kind not in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER):
            return (after - kept).sum(axis=0), held
        # A group of n ranks that have S each moves (n - 1) S to reduce and scatter, and as much
        # again to gather. The sum over all ranks is n S for each group.
        times = 2 if kind is StepKind.ALL_REDUCE else 1
        sizes = numbers(self.layout.mesh_shape).max(axis=1)[axes] + 1
        return (sizes - 1) * (times * before.sum(axis=0) // sizes), held
