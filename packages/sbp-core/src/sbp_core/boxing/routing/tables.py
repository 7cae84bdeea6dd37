"""All single steps of a search, over the states of one placement or of two.

States are numbered: those of the source placement, then those of the target placement if it is
another one. Tables are filled by `boxing.routing.table` and kept; what they hold depends on the
meshes, the tensor's extents and the entries that axes may have, not on source and target. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TypeVar

import numpy as np

from sbp_core.boxing.memory import held_at_once
from sbp_core.boxing.routing.layout import (
    Ints,
    Layout,
    common_lengths,
    intervals,
    num_ranks,
    number,
)
from sbp_core.boxing.routing.table import (
    NEVER,
    Shared,
    Sizes,
    Transfers,
    Within,
    positions,
    shard_volumes,
    transfers,
    within,
)
from sbp_core.boxing.step import StepKind

_Made = TypeVar("_Made", bound=Callable[..., object])

#: The codes that each axis of a mesh may have.
Entries = tuple[tuple[int, ...], ...]

#: A mesh: its shape, and the entries of its axes.
Mesh = tuple[tuple[int, ...], Entries]

#: Up to so many states tables take up to 0.1 MB, up to 3 MB, or else some 30 MB: as many of them
#: are kept. Tensors of uneven extents have tables of their own, of which a model needs many.
_SMALL, _MEDIUM = 40, 216
_SMALL_KEPT, _MEDIUM_KEPT, _LARGE_KEPT = 1024, 48, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
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
        sizes: Of the tensor.
        source: Steps on the source placement.
        target: Steps on the target placement; None if it is the same.
        crossing: Transfers from the one to the other; None if they are the same.
        shared: Ranks that are in both.
        exact: Memory of the transfers that were asked for, by state numbers.
    """

    sizes: Sizes
    source: Within
    target: Within | None
    crossing: Transfers | None
    shared: tuple[Ints, Ints]
    exact: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def num_states(self) -> int:
        """Number of states of both placements."""
        return self.num_source + (0 if self.target is None else len(self.target.layout))

    @property
    def lengths(self) -> tuple[Ints, Ints | None, Ints | None]:
        """What the least step moves: on the source placement, across, on the target placement."""
        if self.target is None or self.crossing is None:
            return self.source.least, None, None
        return self.source.least, self.crossing.elements, self.target.least

    def least(self, states: Ints) -> Ints:
        """Return what the least step between each two states moves, row by column."""
        if self.target is None or self.crossing is None:
            return self.source.least[np.ix_(states, states)]
        split = int(np.searchsorted(states, self.num_source))
        here, there = states[:split], states[split:] - self.num_source
        least = np.full((len(states), len(states)), NEVER, dtype=np.int64)
        least[:split, :split] = self.source.least[np.ix_(here, here)]
        least[:split, split:] = self.crossing.elements[np.ix_(here, there)]
        least[split:, split:] = self.target.least[np.ix_(there, there)]
        return least

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
        """Say whether two states are on different placements."""
        return before < self.num_source <= after

    def codes(self, state: int) -> tuple[int, ...]:
        """Return the entries of a state."""
        layout, at = self._at(state)
        return tuple(layout.codes[at].tolist())

    def _at(self, state: int) -> tuple[Layout, int]:
        if self.target is None or state < self.num_source:
            return self.source.layout, state
        return self.target.layout, state - self.num_source

    def block(self, states: Ints) -> Block:
        """Return the steps among some states.

        Args:
            states: Numbers, ascending.
        """
        if self.target is None or self.crossing is None:
            return _block(self.source, states)
        split = int(np.searchsorted(states, self.num_source))
        here, there = states[:split], states[split:] - self.num_source
        first, second = _block(self.source, here), _block(self.target, there)
        corner = np.ix_(here, there)

        def join(one: Ints, two: Ints, across: Ints | int, back: int) -> Ints:
            joined = np.full((len(states), len(states)), back, dtype=np.int64)
            joined[:split, :split], joined[split:, split:] = one, two
            joined[:split, split:] = across
            return joined

        return Block(
            moved=join(first.moved, second.moved, NEVER, NEVER),
            moved_by_transfer=join(
                first.moved_by_transfer,
                second.moved_by_transfer,
                self.crossing.elements[corner],
                NEVER,
            ),
            held=join(first.held, second.held, NEVER, NEVER),
            held_by_transfer=join(
                first.held_by_transfer, second.held_by_transfer, self.crossing.memory[corner], NEVER
            ),
            kind=join(first.kind, second.kind, 0, 0),
            axes=join(first.axes, second.axes, 0, 0),
        )

    def transfer_memory(self, before: int, after: int) -> int:
        """Return the most that a rank holds in a transfer, counted as in `Sizes`."""
        key = (before, after)
        if key not in self.exact:
            (source, u), (target, v) = self._at(before), self._at(after)
            shared = self.shared
            if not self.crosses(before, after):
                everyone = np.arange(prod(source.mesh_shape))
                shared = (everyone, everyone)
            self.exact[key] = _transfer_memory(self.sizes, source, u, target, v, shared)
        return self.exact[key]


def _block(tables: Within, states: Ints) -> Block:
    at = np.ix_(states, states)
    return Block(
        moved=tables.elements[at],
        moved_by_transfer=tables.transfers.elements[at],
        held=tables.memory[at],
        held_by_transfer=tables.transfers.memory[at],
        kind=tables.kind[at],
        axes=tables.axes[at],
    )


def _transfer_memory(
    sizes: Sizes, source: Layout, u: int, target: Layout, v: int, shared: tuple[Ints, Ints]
) -> int:
    """Return what the fullest rank holds in one transfer; see `slices.transfer_pieces`."""
    messages = _messages(sizes, source, u, target, v, shared)
    num_senders, num_receivers = messages.shape
    place = np.arange(num_senders, num_senders + num_receivers)
    place[shared[1]] = shared[0]
    before, after, sent, received = np.zeros((4, num_senders + num_receivers), dtype=np.int64)
    before[:num_senders] = shard_volumes(source, sizes)[:, source.form[u]]
    after[place] = shard_volumes(target, sizes)[:, target.form[v]]
    sent[:num_senders] = messages.sum(axis=1)
    received[place] = messages.sum(axis=0)
    return int(held_at_once(StepKind.TRANSFER, before, after, sent, received).max())


def _messages(
    sizes: Sizes, source: Layout, u: int, target: Layout, v: int, shared: tuple[Ints, Ints]
) -> Ints:
    """Return what each source rank sends each target rank, but itself."""
    ms, mt = source.mesh_shape, target.mesh_shape
    lengths = []
    for dim, extent in enumerate(sizes.extents):
        held = tuple(bound[source.splits[u, dim]][:, None] for bound in intervals(extent, ms))
        wanted = tuple(bound[target.splits[v, dim]][None, :] for bound in intervals(extent, mt))
        lengths.append(common_lengths((held[0], held[1]), (wanted[0], wanted[1])))
    tile = number(ms, int(source.partial[u] | source.split[u]))
    term = number(ms, int(source.partial[u]))
    copies = num_ranks(ms, int(source.copied[u]))
    copy = number(ms, int(source.copied[u]))
    receivers = np.arange(prod(mt))
    sends = copy[:, None] == receivers[None, :] % copies
    own = np.full(len(receivers), -1)
    own[shared[1]] = tile[shared[0]]
    sends &= tile[:, None] != own[None, :]
    if target.sums[v]:
        home = number(mt, int(target.sums[v]))
        box = number(mt, int(target.split[v]))
        votes = np.zeros((tile.max() + 1, box.max() + 1, home.max() + 1), dtype=np.int64)
        np.add.at(votes, (tile[shared[0]], box[shared[1]], home[shared[1]]), 1)
        turns = (term[:, None] + np.arange(votes.shape[2])[None, :]) % votes.shape[2]
        ballots = np.take_along_axis(votes[tile], turns[:, None, :], axis=2)
        homes = np.take_along_axis(turns, ballots.argmax(axis=2), axis=1)
        sends &= homes[:, box] == home[None, :]
    else:
        count = num_ranks(ms, int(source.partial[u]))
        repeats = num_ranks(mt, int(target.partial[v]))
        part = number(mt, int(target.partial[v]))[None, :]
        term = term[:, None]
        sends &= np.where(part < count, term % repeats == part, term == part % count)
    messages: Ints = sizes.volumes(lengths) * sends
    return messages


def tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    """Return the tables of one placement, or of two; cached.

    Args:
        source: The source placement.
        target: The target placement; None if it is the same.
        shared: The ranks that both have; empty if they are the same.
        sizes: Of the tensor.
    """
    num_states = max(_num_states(mesh) for mesh in (source, target) if mesh is not None)
    return _kept(num_states, _small_tables, _medium_tables, _large_tables)(
        source, target, shared, sizes
    )


def _num_states(mesh: Mesh) -> int:
    return prod(map(len, mesh[1]))


def _kept(num_states: int, small: _Made, medium: _Made, large: _Made) -> _Made:
    """Return the one of three that is for tables of a number of states."""
    if num_states <= _SMALL:
        return small
    return medium if num_states <= _MEDIUM else large


@lru_cache(maxsize=_SMALL_KEPT)
def _small_tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    return _tables(source, target, shared, sizes)


@lru_cache(maxsize=_MEDIUM_KEPT)
def _medium_tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    return _tables(source, target, shared, sizes)


@lru_cache(maxsize=_LARGE_KEPT)
def _large_tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    return _tables(source, target, shared, sizes)


def _tables(source: Mesh, target: Mesh | None, shared: Shared, sizes: Sizes) -> Tables:
    first = _within(source, sizes)
    if target is None:
        return Tables(sizes, first, None, None, positions(shared))
    second = _within(target, sizes)
    crossing = transfers(first.layout, second.layout, sizes, shared)
    return Tables(sizes, first, second, crossing, positions(shared))


def _within(mesh: Mesh, sizes: Sizes) -> Within:
    return _kept(_num_states(mesh), _small_within, _medium_within, _large_within)(mesh, sizes)


@lru_cache(maxsize=_SMALL_KEPT)
def _small_within(mesh: Mesh, sizes: Sizes) -> Within:
    return within(*mesh, sizes)


@lru_cache(maxsize=_MEDIUM_KEPT)
def _medium_within(mesh: Mesh, sizes: Sizes) -> Within:
    return within(*mesh, sizes)


@lru_cache(maxsize=_LARGE_KEPT)
def _large_within(mesh: Mesh, sizes: Sizes) -> Within:
    return within(*mesh, sizes)


def clear_tables() -> None:
    """Forget all tables; for measuring."""
    for cached in (_small_tables, _medium_tables, _large_tables):
        cached.cache_clear()
    for kept in (_small_within, _medium_within, _large_within):
        kept.cache_clear()
