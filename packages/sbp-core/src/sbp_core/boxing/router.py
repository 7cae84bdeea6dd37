"""The router: the one routine that finds how a tensor gets from one (placement, nd-SBP) to another.

Shortest path (Dijkstra) over the nd-SBPs of the source placement and those of the target placement.
An edge is one `Step`: a collective or local step on one mesh axis, or a `TRANSFER`, which does
anything at once, point to point. The length of an edge is (bytes, effort, transferred bytes),
compared in this order: exact bytes over all ranks decide, among equals the fewest steps with
collectives before transfers, then the fewest bytes point to point. Everything is enumerated in a
fixed order, so every process finds the same route.

On the way a tensor is split only along dims that an end splits (and one more, to reduce in parts),
and is `P` only where an end is; a transfer starts at the source or ends at the target. Partials of
two different reductions on one tensor may therefore take more bytes than the least possible. Prices
in seconds are `boxing.price`. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count

from sbp_core.boxing.slices import (
    can_transfer,
    collective_bytes,
    is_realisable,
    itemsize,
    transfer_bytes,
    uniform_bytes,
)
from sbp_core.boxing.step import Route, Step, StepKind
from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import B, Broadcast, NdSbp, Partial, S, Sbp, Split, check_sbp

#: A tensor's place and SBP.
State = tuple[Placement, NdSbp]

#: Length of a path: bytes, effort, bytes point to point.
Cost = tuple[int, int, int]

# Efforts only break ties of bytes: any number of collectives goes before a transfer, and any number
# of local steps (at most two an axis) before a collective.
_EFFORT = {StepKind.LOCAL: 1, StepKind.TRANSFER: 10_000}
_COLLECTIVE_EFFORT = 100


def route(shape: Sequence[int], dtype: str, source: State, target: State) -> Route:
    """Find the route of a logical tensor that moves the fewest bytes.

    Args:
        shape: Of the logical tensor.
        dtype: Its dtype name, such as `float32`.
        source: (placement, nd-SBP) before.
        target: (placement, nd-SBP) after; the placements may share all, some or no ranks.

    Returns:
        The route; without steps if source and target are the same. Cached.

    Raises:
        SbpValueError: no such dtype, an nd-SBP does not fit the shape or mesh, or the dtype has no
            such partial values.
    """
    return _route(tuple(shape), dtype, source, target)


def conversion_bytes(
    shape: Sequence[int], dtype: str, placement: Placement, source: NdSbp, target: NdSbp
) -> int:
    """Return the bytes of the route between two nd-SBPs on one placement, summed over ranks."""
    if source == target:
        return 0
    return _route(tuple(shape), dtype, (placement, source), (placement, target)).bytes


@lru_cache(maxsize=65536)
def _route(shape: tuple[int, ...], dtype: str, source: State, target: State) -> Route:
    for placement, sbp in (source, target):
        check_sbp(shape, sbp, placement.mesh_shape)
        _check_dtype(dtype, sbp)
    steps = _Search(shape, dtype, source, target).run()
    return Route(shape=shape, dtype=dtype, source=source, target=target, steps=steps)


def _check_dtype(dtype: str, sbp: NdSbp) -> None:
    itemsize(dtype)
    ordered, adds = not dtype.startswith("complex"), dtype != "bool"
    for entry in sbp:
        if isinstance(entry, Partial) and not (adds if entry.reduction == "sum" else ordered):
            raise SbpValueError(
                f"{dtype} values have no {entry!r}: they cannot be "
                + ("added" if entry.reduction == "sum" else "ordered"),
                accepted='S(dim), B, P("max"), P("min")' if ordered else "S(dim), B, P",
            )


class _Search:
    """One search: the states that are worth visiting, and the steps between them."""

    def __init__(self, shape: tuple[int, ...], dtype: str, source: State, target: State) -> None:
        self.shape, self.dtype = shape, dtype
        self.source, self.target = source, target
        self.entries = {source[0]: self._entries(source), target[0]: self._entries(target)}
        if source[0] == target[0]:
            both = zip(self._entries(source), self._entries(target), strict=True)
            self.entries = {source[0]: [list(dict.fromkeys((*a, *b))) for a, b in both]}

    def _entries(self, state: State) -> list[list[Sbp]]:
        """Return what each axis of a placement may be on the way.

        Splits of the dims that the two ends split, and of one more dim if there is something to
        reduce (a reduction is cheapest in parts); `B`; and `P` only where an end has it.
        """
        ends = (self.source[1], self.target[1])
        dims = {entry.dim for sbp in ends for entry in sbp if isinstance(entry, Split)}
        spare = [dim for dim in range(len(self.shape)) if dim not in dims]
        if spare and self.source[1].has_partial:
            size = self.source[0].size
            dims.add(max(spare, key=lambda dim: (self.shape[dim] % size == 0, self.shape[dim])))
        free: list[Sbp] = [*(S(dim) for dim in sorted(dims)), B]
        return [[*free, entry] if isinstance(entry, Partial) else free for entry in state[1]]

    def run(self) -> tuple[Step, ...]:
        """Return the steps of the shortest path."""
        turn = count()
        best: dict[State, Cost] = {self.source: (0, 0, 0)}
        came_by: dict[State, Step] = {}
        queue: list[tuple[Cost, int, State]] = [((0, 0, 0), next(turn), self.source)]
        done: set[State] = set()
        while queue:
            cost, _, state = heapq.heappop(queue)
            if state == self.target:
                break
            if state in done:
                continue
            done.add(state)
            for step in self._steps(state):
                longer = _add(cost, step)
                if step.target not in best or longer < best[step.target]:
                    best[step.target] = longer
                    came_by[step.target] = step
                    heapq.heappush(queue, (longer, next(turn), step.target))
        path: list[Step] = []
        state = self.target
        while state != self.source:
            path.append(came_by[state])
            state = path[-1].source
        return tuple(reversed(path))

    def _steps(self, state: State) -> Iterator[Step]:
        """Yield the steps that lead out of a state."""
        yield from self._axis_steps(state)
        source, target = self.source, self.target
        # Without partial values one transfer moves the fewest bytes there can be, so a detour pays
        # only where there are some: to reduce before or after the transfer, or to make them.
        partial = source[1].has_partial or target[1].has_partial
        starts = state == source or (partial and state[0] == source[0])
        if starts and can_transfer(state[1], target[1]):
            yield self._transfer(state, target)
        if partial and state == source and (source[0] != target[0] or source[0].num_axes > 1):
            for sbp in _product(self.entries[target[0]]):
                other = (target[0], sbp)
                if other not in (source, target) and can_transfer(state[1], sbp):
                    yield self._transfer(state, other)

    def _axis_steps(self, state: State) -> Iterator[Step]:
        """Yield the collectives and local steps on one mesh axis that lead out of a state."""
        placement, sbp = state
        for axis, entries in enumerate(self.entries[placement]):
            for entry in entries:
                if entry == sbp[axis]:
                    continue
                kind = _axis_kind(placement, sbp, axis, entry)
                if kind is None:
                    continue
                step = Step(
                    kind=kind,
                    shape=self.shape,
                    dtype=self.dtype,
                    source=state,
                    target=(placement, sbp.replace(axis, entry)),
                    axes=(axis,),
                    size_bytes=0,
                )
                size_bytes = uniform_bytes(step)
                if size_bytes is None and is_realisable(step):
                    size_bytes = collective_bytes(step)
                if size_bytes is not None:
                    yield replace(step, size_bytes=size_bytes)

    def _transfer(self, source: State, target: State) -> Step:
        step = Step(
            kind=StepKind.TRANSFER,
            shape=self.shape,
            dtype=self.dtype,
            source=source,
            target=target,
            axes=(),
            size_bytes=0,
        )
        return replace(step, size_bytes=transfer_bytes(step))


def _axis_kind(placement: Placement, sbp: NdSbp, axis: int, target: Sbp) -> StepKind | None:
    """Return the primitive that changes one mesh axis to `target`, or None if there is none."""
    source = sbp[axis]
    if placement.mesh_shape[axis] == 1:
        return StepKind.LOCAL
    if isinstance(source, Partial):
        inner = [entry for entry in sbp[axis + 1 :] if isinstance(entry, Partial)]
        if isinstance(target, Partial) or any(entry != source for entry in inner):
            return None  # max over a sum is no sum over a max: inner axes are reduced first
        return StepKind.ALL_REDUCE if isinstance(target, Broadcast) else StepKind.REDUCE_SCATTER
    if isinstance(target, Partial):
        # Zeros around a slice are neutral for sums only.
        pads = isinstance(source, Split)
        return None if pads and target.reduction != "sum" else StepKind.LOCAL
    if isinstance(source, Broadcast):
        return StepKind.LOCAL
    return StepKind.ALL_GATHER if isinstance(target, Broadcast) else StepKind.ALL_TO_ALL


def _add(cost: Cost, step: Step) -> Cost:
    size_bytes, effort, transferred = cost
    return (
        size_bytes + step.size_bytes,
        effort + _EFFORT.get(step.kind, _COLLECTIVE_EFFORT),
        transferred + (step.size_bytes if step.kind is StepKind.TRANSFER else 0),
    )


def _product(entries: list[list[Sbp]]) -> Iterator[NdSbp]:
    """Yield every nd-SBP of these entries, in order."""
    if not entries:
        yield NdSbp()
        return
    for first in entries[0]:
        for rest in _product(entries[1:]):
            yield NdSbp(first, *rest)
