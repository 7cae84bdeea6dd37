"""Find the best path of collectives and transfers between two layouts of a tensor, for the router.

The path leads through the tables of all single steps (`step_tables`). Paths are compared by bytes,
then memory, then effort. Bytes and effort add up along a path, memory is the largest of its steps,
so no single pass can compare all three (a path may be ahead only until a later step needs more
memory anyway). Three passes, each over the result of the one before:

    bytes    distance of every state from the source and to the target; keep the steps that are on
             a shortest path, which are few
    memory   the smallest bound under which the kept steps still lead to the target
    effort   the shortest path of the kept steps within that bound; then the first in order

The tables have a lower bound of the memory of a transfer; the resulting path is compared with the
exact value, and the last two passes are repeated until it holds. States are numbers here; steps are
made by `boxing.router`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbp_core.boxing.routing.collectives import KINDS
from sbp_core.boxing.routing.layout import NEVER, Ints
from sbp_core.boxing.routing.step_tables import Tables
from sbp_core.boxing.step import StepKind

# Efforts only break ties of bytes and memory: any number of collectives is better than a transfer,
# and any number of local steps (at most a few for each axis) is better than a collective.
_TRANSFER_EFFORT = 10_000
_EFFORT = np.array([1 if kind is StepKind.LOCAL else 100 for kind in KINDS], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One step of a path, between two states given by their numbers.

    Args:
        kind: Kind of the step.
        axes: Mask of its mesh axes; 0 for a transfer.
        source, target: Numbers of the states.
        elements: Elements moved between ranks, counted as in `Sizes`.
        crosses: Whether it leads from the source placement to another one.
    """

    kind: StepKind
    axes: int
    source: int
    target: int
    elements: int
    crosses: bool


def shortest_path(
    tables: Tables, source: int, target: int, *, fewest_between: bool = False
) -> tuple[Edge, ...]:
    """Return the best path between two states.

    Args:
        tables: All single steps.
        source: Number of the first state.
        target: Number of the last state.
        fewest_between: Whether paths with equal bytes are compared first by the bytes of the step
            from one placement to the other.
    """
    # A step from u to v is on a shortest path if and only if
    #
    #     from_source[u] + length(u, v) + to_target[v] == total
    #
    # and a state if from_source + to_target == total. Only states nearer than the target can, so
    # the second pass, back from the target, needs only these few.
    from_source = _distances(tables, source, target)
    total = from_source[target]
    near = (from_source <= total).nonzero()[0]
    to_target = np.full(len(near), NEVER, dtype=np.int64)
    to_target[near == target] = 0
    if len(near) > 2:
        _relax(to_target, tables.least(near).T, total)
    else:
        to_target[near == source] = total
    tight = from_source[near] + to_target == total
    kept, left = near[tight], to_target[tight]
    # Among the kept states, the elements of a step on a shortest path are a difference of
    # distances.
    ties = _TiedSteps(tables, kept, left[:, None] - left[None, :])
    if fewest_between:
        ties.keep_fewest_between()
    return ties.path(*kept.searchsorted((source, target)).tolist())


def _distances(tables: Tables, source: int, target: int) -> Ints:
    """Return the distance of every state from the source; large if it is beyond the target's."""
    first, crossing, second = tables.lengths
    best = np.full(tables.num_states, NEVER, dtype=np.int64)
    best[source] = 0
    if second is None or crossing is None:
        _relax(best, first, NEVER - 1, target)
        return best
    # A route crosses once, and never goes back: all distances on the source placement, then the
    # best crossing to each state of the target placement, then the distances there. `here` and
    # `there` are views of `best`, which is filled through them.
    here, there = best[: len(first)], best[len(first) :]
    goal = target - len(first)
    _relax(here, first, min(NEVER - 1, int(crossing[source, goal])))
    reached = (here < NEVER).nonzero()[0]
    np.minimum.reduce(here[reached, None] + crossing[reached], out=there)
    _relax(there, second, NEVER - 1, goal)
    return best


def _relax(best: Ints, lengths: Ints, most: int, target: int | None = None) -> None:
    """Improve distances by steps of given lengths until nothing changes, in place.

    Args:
        best: Distance of each state so far.
        lengths: Length of the step from each state (row) to each other (column).
        most: Larger distances do not matter.
        target: Distances larger than this state's do not matter either.
    """
    # Bellman and Ford's algorithm, with all steps from the states of one round taken at once.
    # Rounds are few: a path of n steps takes n of them, and routes are short.
    changed = (best <= most).nonzero()[0]
    while len(changed):
        longer = (best[changed, None] + lengths[changed]).min(axis=0)
        if target is not None:
            most = min(most, int(best[target]), int(longer[target]))
        changed = ((longer < best) & (longer <= most)).nonzero()[0]
        best[changed] = longer[changed]


class _TiedSteps:
    """The steps that are on shortest paths, and the choice among them.

    Args:
        tables: All single steps.
        states: Numbers of the states on the way, ascending.
        length: The elements of a step between each two of them if it is on a shortest path.
    """

    def __init__(self, tables: Tables, states: Ints, length: Ints) -> None:
        block = tables.block(states)
        self._tables, self._states, self._block, self._length = tables, states, block, length
        self._held = np.where(block.moved == length, block.held, NEVER)
        tight = block.moved_by_transfer == length
        np.fill_diagonal(tight, val=False)  # staying moves nothing, and is not a step
        self._held_by_transfer = np.where(tight, block.held_by_transfer, NEVER)
        self._effort = _EFFORT[block.kind]

    def keep_fewest_between(self) -> None:
        """Among steps from one placement to the other, keep the ones that move least."""
        # A route crosses once, and each of these steps is on a shortest path: so the least crossing
        # is part of a whole path.
        there = np.array([self._tables.crosses(0, int(state)) for state in self._states])
        crossing = ~there[:, None] & there[None, :]
        taken = crossing & (np.minimum(self._held, self._held_by_transfer) < NEVER)
        if taken.any():
            more = crossing & (self._length > self._length[taken].min())
            self._held[more] = self._held_by_transfer[more] = NEVER

    def path(self, start: int, end: int) -> tuple[Edge, ...]:
        """Return the best path between two of the states, by their index here."""
        if len(self._states) == 2:
            return (self._only(start, end),)
        # Each round that fails has found a transfer that holds more than its lower bound. There
        # are finitely many, so the loop ends.
        while True:
            bound = self._least_memory(start, end)
            edges = self._least_effort(bound, start, end)
            if self._stands(bound, edges):
                return edges

    def _only(self, start: int, end: int) -> Edge:
        """Return the better of the one or two steps between the two states."""
        held, by_transfer = int(self._held[start, end]), int(self._held_by_transfer[start, end])
        if by_transfer < held < NEVER:
            by_transfer = self._tables.transfer_memory(*self._states[[start, end]].tolist())
        return self._edge(start, end, alone=held <= by_transfer)

    def _stands(self, bound: int, edges: tuple[Edge, ...]) -> bool:
        """Compare a path with the exact memory of its transfers, and record that memory."""
        stands = True
        for edge in edges:
            if edge.kind is StepKind.TRANSFER:
                exact = self._tables.transfer_memory(edge.source, edge.target)
                at = np.searchsorted(self._states, [edge.source, edge.target])
                self._held_by_transfer[at[0], at[1]] = exact
                stands &= exact <= bound
        return stands

    def _least_memory(self, start: int, end: int) -> int:
        """Return the smallest memory under which there is a path."""
        # As in `_relax`, but a path is as long as its longest step: a maximum instead of a sum.
        held = np.minimum(self._held, self._held_by_transfer)
        best = np.full(len(held), NEVER, dtype=np.int64)
        best[start] = 0
        changed = np.array([start])
        while len(changed):
            most = np.maximum(best[changed, None], held[changed]).min(axis=0)
            changed = ((most < best) & (most < best[end])).nonzero()[0]
            best[changed] = most[changed]
        return int(best[end])

    def _least_effort(self, bound: int, start: int, end: int) -> tuple[Edge, ...]:
        """Return the first of the paths of least effort within a bound of memory."""
        alone = self._held <= bound
        effort = np.where(self._held_by_transfer <= bound, _TRANSFER_EFFORT, NEVER)
        effort[alone] = self._effort[alone]
        left = np.full(len(effort), NEVER, dtype=np.int64)
        left[end] = 0
        _relax(left, effort.T, NEVER - 1, start)
        # From the start, always to the first state from which the rest has the least length: this
        # is the first of the best paths in the order of states, the same in every process.
        edges: list[Edge] = []
        at = start
        while at != end:
            after = int((effort[at] + left == left[at]).nonzero()[0][0])
            edges.append(self._edge(at, after, alone=bool(alone[at, after])))
            at = after
        return tuple(edges)

    def _edge(self, before: int, after: int, *, alone: bool) -> Edge:
        """Return a step: within the placement's groups (`alone`: no transfer), or a transfer."""
        states = int(self._states[before]), int(self._states[after])
        return Edge(
            kind=KINDS[self._block.kind[before, after]] if alone else StepKind.TRANSFER,
            axes=int(self._block.axes[before, after]) if alone else 0,
            source=states[0],
            target=states[1],
            elements=int(self._length[before, after]),
            crosses=self._tables.crosses(*states),
        )
