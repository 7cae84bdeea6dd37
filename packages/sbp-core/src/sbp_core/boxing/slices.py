"""Compute the slices that a boxing step (a collective or transfer) moves, and between which ranks.

Everything is worked out from the slices of the logical tensor that ranks hold (`Bounds`), so even
and uneven splits, empty shards and any overlap of rank sets are the same case. Prices, executors
and backends all read the pieces listed here. This module moves no data.

Words used below: the *partials* of a `P` tensor are its addends (or arguments of max, min),
numbered in row-major order over the mesh axes that are `P`; a *term* is one value that a receiver
reduces. A *tile* is the slice that a rank holds before a step, a *box* its slice after the step.
From (P, S(0)) on a 2 x 2 mesh to (S(1)) on two other ranks, of a 4 x 4 tensor:

    partial 0          partial 1          boxes
    rank 0: rows 0-1   rank 2: rows 0-1   rank 4: columns 0-1
    rank 1: rows 2-3   rank 3: rows 2-3   rank 5: columns 2-3

    rank 4 receives    term 0: columns 0-1 of rank 0, columns 0-1 of rank 1    put together
                       term 1: columns 0-1 of rank 2, columns 0-1 of rank 3    put together, added
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Partial, Split, local_bounds, split_bounds

#: Half-open bounds of a slice of the logical tensor, one pair for each dim.
Bounds = tuple[tuple[int, int], ...]

_CACHED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPiece:
    """One slice that goes from one rank to another (or stays, if they are the same).

    Args:
        sender, receiver: Ranks.
        term: The receiver puts all pieces of one term together, then reduces terms in order.
        source: Bounds of the piece in the sender's shard: (start, stop) of each dim.
        target: Its bounds in the receiver's shard.
        size_bytes: Bytes of the piece.
    """

    sender: int
    receiver: int
    term: int
    source: Bounds
    target: Bounds
    size_bytes: int

    @property
    def source_slices(self) -> tuple[slice, ...]:
        """Index of the piece in the sender's shard."""
        return tuple(slice(start, stop) for start, stop in self.source)

    @property
    def target_slices(self) -> tuple[slice, ...]:
        """Index of the piece in the receiver's shard."""
        return tuple(slice(start, stop) for start, stop in self.target)


def itemsize(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        SbpValueError: no such dtype.
    """
    if dtype not in ITEMSIZE:
        raise SbpValueError(f"no dtype is called {dtype!r}", accepted=", ".join(ITEMSIZE))
    return ITEMSIZE[dtype]


def volume(bounds: Bounds) -> int:
    """Return the number of elements of a slice."""
    return prod(stop - start for start, stop in bounds)


def intersection(one: Bounds, other: Bounds) -> Bounds:
    """Return the common slice; empty (start == stop in some dim) if there is none."""
    # If the slices are apart, min(b, d) is before max(a, c): no slice may stop before it starts.
    return tuple(
        (max(a, c), max(min(b, d), a, c)) for (a, b), (c, d) in zip(one, other, strict=True)
    )


def overlap(one: Bounds, other: Bounds) -> int:
    """Return the number of elements that two slices share."""
    size = 1
    for (a, b), (c, d) in zip(one, other, strict=True):
        size *= max(0, min(b, d) - max(a, c))
    return size


def _relative(inner: Bounds, outer: Bounds) -> Bounds:
    """Return the bounds of `inner` counted from the start of `outer`."""
    return tuple((a - c, b - c) for (a, b), (c, _) in zip(inner, outer, strict=True))


@lru_cache(maxsize=_CACHED)
def bounds_of(shape: tuple[int, ...], placement: Placement, sbp: NdSbp) -> Mapping[int, Bounds]:
    """Return the slice of the logical tensor that each rank holds, in mesh order.

    Raises:
        SbpValueError: the nd-SBP does not fit the shape or the mesh.
    """
    return {
        rank: local_bounds(shape, sbp, placement.mesh_shape, at)
        for rank, at in placement.coordinates()
    }


def partial_axes(sbp: NdSbp, reduction: str | None = None) -> tuple[int, ...]:
    """Return the mesh axes that are `P` (of one reduction, or of any)."""
    return tuple(
        axis
        for axis, entry in enumerate(sbp)
        if isinstance(entry, Partial) and reduction in (None, entry.reduction)
    )


def num_partials(placement: Placement, sbp: NdSbp) -> int:
    """Return the number of partials of each element."""
    return prod(placement.mesh_shape[axis] for axis in partial_axes(sbp))


def _index(placement: Placement, at: Sequence[int], axes: Sequence[int]) -> int:
    """Return the row-major number of a coordinate among some axes."""
    index = 0
    for axis in axes:
        index = index * placement.mesh_shape[axis] + at[axis]
    return index


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The ranks that hold each slice of each source partial of a `TRANSFER`, in mesh order."""

    holders: Mapping[tuple[int, Bounds], tuple[int, ...]]
    #: For targets that are `P(sum)`: the target partial into which the common slice of a tile and a
    #: box is added, by (source partial, tile, box).
    homes: Mapping[tuple[int, Bounds, Bounds], int]

    @classmethod
    def of(cls, step: BoxingStep) -> _Tiles:
        """Sort the source ranks by the slices that they hold."""
        (before, source), (after, target) = step.source, step.target
        held, wanted = bounds_of(step.shape, before, source), bounds_of(step.shape, after, target)
        axes, sums = partial_axes(source), partial_axes(target, "sum")
        holders: dict[tuple[int, Bounds], tuple[int, ...]] = {}
        for rank, at in before.coordinates():
            if volume(held[rank]):
                key = (_index(before, at, axes), held[rank])
                holders[key] = (*holders.get(key, ()), rank)
        homes: dict[tuple[int, Bounds, Bounds], int] = {}
        parts = prod(after.mesh_shape[axis] for axis in sums)
        for (term, tile), ranks in holders.items() if sums else ():
            # An addend counts in any target partial, but in only one. It is best added where it
            # need not travel: in the partial whose ranks already hold most copies of it. Among
            # equals, the first in turn from the number of the term: so the addends of many terms
            # spread over the target partials, and no rank receives all of them.
            saved: dict[Bounds, list[int]] = {box: [0] * parts for box in wanted.values()}
            for rank in ranks:
                if rank in wanted:
                    j = _index(after, after.coordinate(rank), sums)
                    saved[wanted[rank]][j] += overlap(tile, wanted[rank])
            turns = [(term + turn) % parts for turn in range(parts)]
            for box, savings in saved.items():
                homes[term, tile, box] = max(turns, key=savings.__getitem__)
        return cls(holders, homes)


def _terms(step: BoxingStep) -> Mapping[int, tuple[int, ...]]:
    """Return for each receiver of a `TRANSFER` the partials that it reduces; not for a `P(sum)`.

    A target without `P` reduces all of them. The partials of a `P(max)` or `P(min)` target share
    them: partial j takes the ones equal to j modulo the number of target partials. If none is left
    for it, it repeats one, which does no harm.
    """
    (before, source), (after, target) = step.source, step.target
    count, axes = num_partials(before, source), partial_axes(target)
    if not axes:
        return dict.fromkeys(after.rank_list, tuple(range(count)))
    repeats = prod(after.mesh_shape[axis] for axis in axes)
    terms: dict[int, tuple[int, ...]] = {}
    for rank, at in after.coordinates():
        j = _index(after, at, axes)
        terms[rank] = tuple(range(j, count, repeats)) or (j % count,)
    return terms


def can_transfer(source: NdSbp, target: NdSbp) -> bool:
    """Return whether one `TRANSFER` leads from source to target.

    Partials of different reductions must be reduced from the inner axis to the outer one, which
    takes a step each.
    """
    before = {entry.reduction for entry in source if isinstance(entry, Partial)}
    after = {entry.reduction for entry in target if isinstance(entry, Partial)}
    return not before or (len(before) == 1 and (not after or after == before))


def transfer_bytes(step: BoxingStep) -> int:
    """Return the bytes that a `TRANSFER` moves between ranks, without listing its pieces.

    A receiver needs each of its terms once, less the part of that term that it already holds.
    """
    (before, source), (after, target) = step.source, step.target
    held, wanted = bounds_of(step.shape, before, source), bounds_of(step.shape, after, target)
    axes, sums = partial_axes(source), partial_axes(target, "sum")
    elements = 0
    if sums:
        # Each addend goes to one target partial, and there to all ranks that need the box: as many
        # as in any other partial. So all terms cost as much as if all went to partial 0, less the
        # parts that a rank already has.
        tiles = _Tiles.of(step)
        homes = {rank: _index(after, at, sums) for rank, at in after.coordinates()}
        first = sum(volume(wanted[rank]) for rank, home in homes.items() if home == 0)
        elements = num_partials(before, source) * first
        for (term, tile), ranks in tiles.holders.items():
            for rank in ranks:
                if rank in wanted and homes[rank] == tiles.homes[term, tile, wanted[rank]]:
                    elements -= overlap(tile, wanted[rank])
        return elements * itemsize(step.dtype)
    # A rank in both meshes holds its tile of one source partial. If it reduces that partial as a
    # receiver, the part common to its tile and its box need not be sent.
    own = {rank: _index(before, at, axes) for rank, at in before.coordinates()}
    for rank, terms in _terms(step).items():
        elements += len(terms) * volume(wanted[rank])
        if own.get(rank) in terms:
            elements -= overlap(held[rank], wanted[rank])
    return elements * itemsize(step.dtype)


@lru_cache(maxsize=_CACHED)
def transfer_pieces(step: BoxingStep) -> tuple[TransferPiece, ...]:
    """Return the pieces of a `TRANSFER`, by receiver, addend (`term`) and sender's slice.

    Among several copies of a slice, a receiver takes its own if it has one; otherwise receivers
    take turns among the copies. Empty pieces are left out; pieces that stay on their rank are
    listed. If the target is `P(sum)`, the pieces of a term need not fill the receiver's shard: the
    rest is zero.
    """
    after, target = step.target
    wanted = bounds_of(step.shape, after, target)
    sums, size, tiles = partial_axes(target, "sum"), itemsize(step.dtype), _Tiles.of(step)
    ordered = sorted(tiles.holders.items())
    terms = {} if sums else _terms(step)
    pieces: list[TransferPiece] = []
    # Many receivers need the same box.
    shared: dict[Bounds, list[tuple[int, Bounds, tuple[int, ...], Bounds]]] = {}
    for turn, (receiver, at) in enumerate(after.coordinates()):
        box = wanted[receiver]
        if box not in shared:
            shared[box] = [
                (term, tile, ranks, common)
                for (term, tile), ranks in ordered
                if volume(common := intersection(tile, box))
            ]
        for term, tile, ranks, common in shared[box]:
            if sums:
                takes = tiles.homes[term, tile, box] == _index(after, at, sums)
            else:
                takes = term in terms[receiver]
            # Receivers take turns among the copies, so that no holder has to serve all of them.
            if takes:
                pieces.append(
                    TransferPiece(
                        sender=receiver if receiver in ranks else ranks[turn % len(ranks)],
                        receiver=receiver,
                        term=term,
                        source=_relative(common, tile),
                        target=_relative(common, box),
                        size_bytes=volume(common) * size,
                    )
                )
    return tuple(pieces)


@lru_cache(maxsize=_CACHED)
def transfer_partners(
    step: BoxingStep,
) -> tuple[Mapping[int, tuple[int, ...]], Mapping[int, tuple[int, ...]]]:
    """Return the senders and receivers of a `TRANSFER`; a piece that stays on a rank counts.

    Returns:
        By sender its receivers, and by receiver its senders, both ascending. Ranks that send
        nothing, or receive nothing, are left out.
    """
    receivers: dict[int, tuple[int, ...]] = {}
    senders: dict[int, tuple[int, ...]] = {}
    for sender, receiver in sorted({(one.sender, one.receiver) for one in transfer_pieces(step)}):
        receivers[sender] = (*receivers.get(sender, ()), receiver)
        senders[receiver] = (*senders.get(receiver, ()), sender)
    return receivers, senders


@lru_cache(maxsize=_CACHED)
def collective_pieces(step: BoxingStep, group: tuple[int, ...]) -> tuple[TransferPiece, ...]:
    """Return the pieces of an all-gather, all-to-all or reduce-scatter in one group.

    Ordered by receiver, term and sender. In a reduce-scatter the terms are the senders, in mesh
    order; the other kinds have one term. Empty pieces are left out.
    """
    held = bounds_of(step.shape, *step.source)
    wanted = bounds_of(step.shape, *step.target)
    # In a reduce-scatter, every sender holds an addend of the same slice; in the other kinds, each
    # holds a different slice, and the receiver puts them side by side.
    reduces, size = step.kind is StepKind.REDUCE_SCATTER, itemsize(step.dtype)
    return tuple(
        TransferPiece(
            sender=sender,
            receiver=receiver,
            term=index if reduces else 0,
            source=_relative(common, held[sender]),
            target=_relative(common, wanted[receiver]),
            size_bytes=volume(common) * size,
        )
        for receiver in group
        for index, sender in enumerate(group)
        if volume(common := intersection(held[sender], wanted[receiver]))
    )


def collective_bytes(step: BoxingStep) -> int:
    """Return the bytes that a collective or local step moves between ranks."""
    held = bounds_of(step.shape, *step.source)
    wanted = bounds_of(step.shape, *step.target)
    elements = 0
    for group in step.source[0].groups(*step.axes):
        others = len(group) - 1
        if step.kind is StepKind.ALL_REDUCE:
            # As a ring: of n parts of the tensor, n - 1 pass each rank on their way to the sum, and
            # n - 1 sums on their way back to everybody.
            elements += 2 * others * volume(held[group[0]])
        elif step.kind is StepKind.REDUCE_SCATTER:
            elements += others * volume(held[group[0]])
        elif step.kind is not StepKind.LOCAL:
            elements += sum(
                volume(wanted[rank]) - overlap(held[rank], wanted[rank]) for rank in group
            )
    return elements * itemsize(step.dtype)


@lru_cache(maxsize=4 * _CACHED)
def sent_bytes(step: BoxingStep, rank: int) -> int:
    """Return the bytes that one rank has to send; over all ranks they add up to `size_bytes`.

    Backends count the bytes that it does send separately (`manifest.TrafficCounter`). An all-reduce
    counts as a ring: of n parts, each rank sends its addend of every other rank's part, and the sum
    of its own part to every other rank.
    """
    if step.kind is StepKind.LOCAL or rank not in step.source[0]:
        return 0
    if step.kind is StepKind.TRANSFER:
        return _sent_in_transfer(step)[rank]
    group = step.group(rank)
    if step.kind is StepKind.ALL_REDUCE:
        total = volume(bounds_of(step.shape, *step.source)[rank])
        # Parts of the flat tensor, as even as possible: the first ones may be larger by one.
        start, stop = split_bounds(total, len(group), group.index(rank))
        elements = (total - (stop - start)) + (len(group) - 1) * (stop - start)
        return elements * itemsize(step.dtype)
    return sum(
        piece.size_bytes
        for piece in collective_pieces(step, group)
        if piece.sender == rank != piece.receiver
    )


@lru_cache(maxsize=_CACHED)
def _sent_in_transfer(step: BoxingStep) -> Mapping[int, int]:
    """Return the bytes that each rank sends in a `TRANSFER`."""
    sent: Counter[int] = Counter()
    for piece in transfer_pieces(step):
        sent[piece.sender] += piece.size_bytes if piece.sender != piece.receiver else 0
    return sent


def local_transition(step: BoxingStep, rank: int) -> tuple[Bounds, Bounds]:
    """Return a rank's slice before and after a local step, as bounds in both shards."""
    held = bounds_of(step.shape, *step.source)[rank]
    wanted = bounds_of(step.shape, *step.target)[rank]
    common = intersection(held, wanted)
    return _relative(common, held), _relative(common, wanted)


def is_realisable(step: BoxingStep) -> bool:
    """Return whether ranks find all data that they need inside their group of the step's mesh axis.

    Mesh axes apply in order, so a change on an outer axis also moves the slices of inner axes that
    split the same dim; then what a rank needs may be outside its group. An all-gather on the outer
    axis of a 2 x 2 mesh, from (S(0), S(0)) to (B, S(0)), of 4 rows, is no step:

        ranks        0    1    2    3          groups on the outer axis: (0, 2) and (1, 3)
        hold         0    1    2    3
        want        0-1  2-3  0-1  2-3         rank 0 wants row 1, which only rank 1 holds

    Checked exactly: the slice that a rank needs must be covered by the slices of its group (its own
    slice, in a local step that slices); and a rank that only pads with zeros must keep its slice.
    """
    held = bounds_of(step.shape, *step.source)
    wanted = bounds_of(step.shape, *step.target)
    # From S to P: each rank puts its slice among zeros, so that the sum over ranks is the tensor.
    pads = step.kind is StepKind.LOCAL and isinstance(step.source[1][step.axes[0]], Split)
    for group in step.source[0].groups(*step.axes):
        covered = _cover([held[rank] for rank in group])
        for rank in group:
            if sum(overlap(tile, wanted[rank]) for tile in covered) != volume(wanted[rank]):
                return False
            if pads and overlap(held[rank], wanted[rank]) != volume(held[rank]):
                return False
    return True


def _cover(tiles: Sequence[Bounds]) -> Sequence[Bounds]:
    """Return disjoint slices with the same union, a single one if the union is a box.

    The slices of one axis group are disjoint, or all the same.
    """
    distinct = [tile for tile in dict.fromkeys(tiles) if volume(tile)]
    # One box instead of many tiles: with n ranks in a group, this saves n * n intersections.
    if len(distinct) < 2:
        return distinct
    hull = tuple(
        (min(start for start, _ in pairs), max(stop for _, stop in pairs))
        for pairs in zip(*distinct, strict=True)
    )
    return [hull] if sum(map(volume, distinct)) == volume(hull) else distinct


def uniform_bytes(step: BoxingStep) -> int | None:
    """Return the result of `collective_bytes` quickly, if every group moves the same amount.

    This holds if every split is even and the step changes only the innermost splits of a dim. Such
    a step is always realisable. None for any other step, which has to examine every group; also for
    an all-to-all that moves a split from one axis to another, in which some ranks keep all.
    """
    (placement, source), (_, target) = step.source, step.target
    parts: list[int] = []
    dims = [
        {e.dim for axis in step.axes if isinstance(e := sbp[axis], Split)}
        for sbp in (source, target)
    ]
    if dims[0] & dims[1]:
        return None
    for sbp, changed_dims in zip((source, target), dims, strict=True):
        for dim in changed_dims:
            split = sbp.split_axes(dim)
            changed = [axis for axis in split if axis in step.axes]
            # Only innermost splits: a change further out moves the slices of the axes inside it.
            if tuple(split[-len(changed) :]) != tuple(changed):
                return None
        pieces = [1] * len(step.shape)
        for extent, entry in zip(placement.mesh_shape, sbp, strict=True):
            if isinstance(entry, Split):
                pieces[entry.dim] *= extent
        if any(extent % count for extent, count in zip(step.shape, pieces, strict=True)):
            return None
        parts.append(prod(step.shape) // prod(pieces))
    before, after = parts
    num_ranks, n = placement.size, prod(placement.mesh_shape[axis] for axis in step.axes)
    # Summed over all ranks. An all-to-all sends all but each rank's own part; a rank of an
    # all-gather lacks `after - before` of its result.
    elements = {
        StepKind.ALL_REDUCE: num_ranks // n * 2 * (n - 1) * before,
        StepKind.REDUCE_SCATTER: num_ranks // n * (n - 1) * before,
        StepKind.ALL_GATHER: num_ranks * (after - before),
        StepKind.ALL_TO_ALL: num_ranks * (before - before // n),
        StepKind.LOCAL: 0,
    }[step.kind]
    return elements * itemsize(step.dtype)
