"""Tabulate the bytes and memory of every single step between layouts of a tensor, for the router.

A state is an nd-SBP on the source or the target placement. States are numbered: first all states of
the source placement, then all states of the target placement if it is another one.
`boxing.routing.collectives` and `boxing.routing.transfers` fill the tables, which are kept: they
depend on the meshes, the tensor's extents and the entries that axes may have, not on source and
target. With two placements a table has four parts; no route goes back:

                       to source states              to target states
    from source states   collectives, transfers        transfers that cross over
    from target states   none                          collectives, transfers
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from sbp_core.boxing.memory import held_at_once
from sbp_core.boxing.routing.collectives import Collectives, collectives
from sbp_core.boxing.routing.layout import (
    NEVER,
    Ints,
    Layout,
    Shared,
    Sizes,
    covers,
    intervals,
    numbers,
    overlaps,
    positions,
    shard_volumes,
)
from sbp_core.boxing.routing.transfers import End, Transfers, messages, transfers
from sbp_core.boxing.step import StepKind

_MadeT = TypeVar("_MadeT")

#: The codes that each axis of a mesh may have.
Entries = tuple[tuple[int, ...], ...]

#: A mesh: its shape, and the entries of its axes.
Mesh = tuple[tuple[int, ...], Entries]

#: Most states of a table, and how many tables of that size are kept: they take up to 0.1 MB, up to
#: 1 MB, or up to 10 MB each. Tensors of uneven extents have separate tables, of which a model needs
#: many.
_KEPT = ((40, 1024), (216, 128), (None, 24))


@dataclass(frozen=True, slots=True, eq=False)
class PlacementTables:
    """All steps between the states of one placement.

    Args:
        layout: The states.
        collectives: The collectives and local steps.
        transfers: The transfers.
        least: The fewest elements that any of the steps between two states moves.
    """

    layout: Layout
    collectives: Collectives
    transfers: Transfers
    least: Ints


class StepBlock(NamedTuple):
    """The steps among some states, row by column: `NEVER` where there is none."""

    moved: Ints
    moved_by_transfer: Ints
    held: Ints
    held_by_transfer: Ints
    kind: Ints
    axes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The steps between the states of one or two placements.

    Args:
        sizes: Sizes of the tensor.
        source: Steps on the source placement.
        target: Steps on the target placement; None if it is the same.
        crossing: Transfers from the source to the target placement; None if they are the same.
        across: The elements that they move, by state; None if they are the same.
        shared: Ranks in both placements.
        exact: Exact memory of transfers computed so far, by state numbers.
    """

    sizes: Sizes
    source: PlacementTables
    target: PlacementTables | None
    crossing: Transfers | None
    across: Ints | None
    shared: tuple[Ints, Ints]
    exact: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_states(self) -> int:
        """Number of states of both placements."""
        return self.num_source + (0 if self.target is None else len(self.target.layout))

    @property
    def lengths(self) -> tuple[Ints, Ints | None, Ints | None]:
        """Elements of the least steps: on the source placement, across, on the target placement."""
        if self.target is None:
            return self.source.least, None, None
        return self.source.least, self.across, self.target.least

    def least(self, states: Ints) -> Ints:
        """Return the elements of the least step between each two states, row by column."""
        if self.target is None or self.across is None:
            return self.source.least[np.ix_(states, states)]
        here, there = self._by_placement(states)
        first, second = self.source.least, self.target.least
        across = self.across[np.ix_(here, there)]
        return _joined(first[np.ix_(here, here)], second[np.ix_(there, there)], across, NEVER)

    def _by_placement(self, states: Ints) -> tuple[Ints, Ints]:
        """Return which of some states are on the source placement, and on the target placement."""
        # States are ascending, so states of the source placement come first: the four parts of the
        # table are blocks.
        split = int(np.searchsorted(states, self.num_source))
        return states[:split], states[split:] - self.num_source

    @property
    def num_source(self) -> int:
        """Number of states of the source placement."""
        return len(self.source.layout)

    def numbers(self, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of the two ends, from their entries."""
        if self.target is None:
            return self.source.layout.index(source), self.source.layout.index(target)
        return self.source.layout.index(source), self.num_source + self.target.layout.index(target)

    def crosses(self, before: int, after: int) -> bool:
        """Return whether two states are on different placements."""
        return before < self.num_source <= after

    def codes(self, state: int) -> tuple[int, ...]:
        """Return the entries of a state."""
        layout, at = self._at(state)
        return tuple(layout.codes[at].tolist())

    def _at(self, state: int) -> tuple[Layout, int]:
        if self.target is None or state < self.num_source:
            return self.source.layout, state
        return self.target.layout, state - self.num_source

    def block(self, states: Ints) -> StepBlock:
        """Return the steps among some states.

        Args:
            states: Numbers, ascending.
        """
        if self.target is None or self.crossing is None:
            return _block(self.source, states)
        here, there = self._by_placement(states)
        across: list[Ints | int] = [NEVER, self.crossing.moved(here, there)]
        across += [NEVER, self.crossing.held(here, there), 0, 0]
        parts = zip(_block(self.source, here), _block(self.target, there), across, strict=True)
        none = (NEVER,) * 4 + (0, 0)
        return StepBlock(*(_joined(*one, back) for one, back in zip(parts, none, strict=True)))

    def transfer_memory(self, before: int, after: int) -> int:
        """Return the most that a rank holds in a transfer, counted as in `Sizes`."""
        key = (before, after)
        if key not in self.exact:
            self.exact[key] = self._transfer_memory(before, after)
        return self.exact[key]

    def _transfer_memory(self, before: int, after: int) -> int:
        (source, u), (target, v) = self._at(before), self._at(after)
        here, there = self.shared
        if not self.crosses(before, after):
            # Within one placement every rank sends and receives, at the same place.
            here = there = np.arange(prod(source.mesh_shape))
        sends = messages(
            self.sizes,
            End(source.mesh_shape, self.codes(before)),
            End(target.mesh_shape, self.codes(after)),
            (here, there),
        )
        # A rank of both placements holds its outgoing and its incoming data, so it needs one place:
        # senders are numbered first, then receivers that do not send.
        num_senders, num_receivers = sends.shape
        place = np.arange(num_senders, num_senders + num_receivers)
        place[there] = here
        held, wanted, sent, received = np.zeros((4, num_senders + num_receivers), dtype=np.int64)
        held[:num_senders] = shard_volumes(source, self.sizes)[:, source.form[u]]
        wanted[place] = shard_volumes(target, self.sizes)[:, target.form[v]]
        sent[:num_senders] = sends.sum(axis=1)
        received[place] = sends.sum(axis=0)
        return int(held_at_once(StepKind.TRANSFER, held, wanted, sent, received).max())


def _joined(first: Ints, second: Ints, across: Ints | int, back: int) -> Ints:
    """Return a table of two placements: each of them, across, and back from the second."""
    split, size = len(first), len(first) + len(second)
    joined = np.full((size, size), back, dtype=np.int64)
    joined[:split, :split], joined[split:, split:], joined[:split, split:] = first, second, across
    return joined


def _block(tables: PlacementTables, states: Ints) -> StepBlock:
    steps, direct = tables.collectives, tables.transfers
    number = steps.number[np.ix_(states, states)]
    return StepBlock(
        moved=steps.elements[number],
        moved_by_transfer=direct.moved(states, states),
        held=steps.memory[number],
        held_by_transfer=direct.held(states, states),
        kind=steps.kind[number],
        axes=steps.axes[number],
    )


def tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    """Return the tables of one placement, or of two; cached.

    Args:
        source: The source placement.
        target: The target placement; None if it is the same.
        shared: The ranks in both; empty if they are the same.
        sizes: Sizes of the tensor.
    """
    num_states = max(_num_states(mesh) for mesh in (source, target) if mesh is not None)
    return _TABLES.of_size(num_states)(source, target, shared, sizes)


def _num_states(mesh: Mesh) -> int:
    return prod(map(len, mesh[1]))


def _tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    first = _PLACEMENT_TABLES.of_size(_num_states(source))(source, sizes)
    at = positions(shared)
    if target is None:
        return Tables(sizes, first, None, None, None, at)
    second = _PLACEMENT_TABLES.of_size(_num_states(target))(target, sizes)
    ends = (first.layout, second.layout)
    crossing = transfers(*ends, sizes, shared, overlaps(*ends, sizes, at))
    # Computed once: every search over two placements adds it to all distances.
    across = crossing.moved(*(np.arange(len(end)) for end in ends))
    return Tables(sizes, first, second, crossing, across, at)


def _placement_tables(mesh: Mesh, sizes: Sizes) -> PlacementTables:
    mesh_shape, entries = mesh
    layout = Layout.of(mesh_shape, entries, len(sizes.extents))
    shared = tuple((rank, rank) for rank in range(prod(mesh_shape)))
    kept = overlaps(layout, layout, sizes, positions(shared))
    steps = collectives(layout, sizes, kept)
    direct = transfers(layout, layout, sizes, shared, kept)
    every = np.arange(len(layout))
    # A transfer can do anything, but collectives that reduce move less: they add on the way.
    least = direct.moved(every, every)
    # Number 0 is no step; see `Collectives`.
    at = steps.number.nonzero()
    least[at] = np.minimum(least[at], steps.elements[steps.number[at]])
    return PlacementTables(layout, steps, direct, least)


class _CacheBySize(Generic[_MadeT]):
    """Results of a function, cached by size.

    With one cache for all, few large tables would evict many small ones, or many large ones would
    fill the memory.
    """

    def __init__(self, make: Callable[..., _MadeT]) -> None:
        self._caches = [(most, lru_cache(maxsize=kept)(make)) for most, kept in _KEPT]

    def of_size(self, num_states: int) -> Callable[..., _MadeT]:
        return next(cache for most, cache in self._caches if most is None or num_states <= most)

    def clear(self) -> None:
        for _, cache in self._caches:
            cache.cache_clear()


_TABLES = _CacheBySize(_tables)
_PLACEMENT_TABLES = _CacheBySize(_placement_tables)


def clear_tables() -> None:
    """Drop all tables, and cached facts about meshes; for measurements."""
    _TABLES.clear()
    _PLACEMENT_TABLES.clear()
    for known in (covers, intervals, numbers):
        known.cache_clear()
