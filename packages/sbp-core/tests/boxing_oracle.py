"""The oracle of the router: every sequence of single steps, tried.

Lists every step between any two states with the definitions of `boxing.slices` and
`boxing.memory`, one `BoxingStep` at a time, and composes them by min-plus products of the whole
matrix. Slow, and without any of the router's shortcuts: nothing is renamed, pruned or bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product

import numpy as np
import numpy.typing as npt

from sbp_core.boxing import BoxingStep, Route, StepKind
from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.slices import can_transfer, collective_bytes, is_realisable, transfer_bytes
from sbp_core.placement import Placement
from sbp_core.sbp import Broadcast, NdSbp, Partial, Split, all_nd_sbps

State = tuple[Placement, NdSbp]
Ints = npt.NDArray[np.int64]

NEVER = 1 << 60

#: Bytes and effort in one number: effort is far below this.
_SCALE = 1 << 20

_EFFORT = {StepKind.LOCAL: 1, StepKind.TRANSFER: 10_000}


def effort(steps: Sequence[BoxingStep]) -> int:
    """Return the effort of some steps."""
    return sum(_EFFORT.get(step.kind, 100) for step in steps)


def single_steps(
    shape: tuple[int, ...], dtype: str, source: State, target: State
) -> Iterator[BoxingStep]:
    """Yield every single step from one state to another, with its bytes."""

    def step(kind: StepKind, axes: tuple[int, ...]) -> BoxingStep:
        return BoxingStep(
            kind=kind,
            shape=shape,
            dtype=dtype,
            source=source,
            target=target,
            axes=axes,
            size_bytes=0,
        )

    if source == target:
        return
    if source[0] == target[0]:
        mesh = source[0].mesh_shape
        changed = {axis for axis in range(len(mesh)) if source[1][axis] != target[1][axis]}
        for size in range(1, len(mesh) + 1):
            for axes in combinations(range(len(mesh)), size):
                if changed <= set(axes):
                    kind = kind_on(mesh, source[1], target[1], axes)
                    if kind is not None and is_realisable(step(kind, axes)):
                        found = step(kind, axes)
                        yield replace(found, size_bytes=collective_bytes(found))
    if can_transfer(source[1], target[1]):
        found = step(StepKind.TRANSFER, ())
        yield replace(found, size_bytes=transfer_bytes(found))


def kind_on(
    mesh: tuple[int, ...], source: NdSbp, target: NdSbp, axes: tuple[int, ...]
) -> StepKind | None:
    """Return what changes these axes at once, if anything may."""
    before, after = {source[axis] for axis in axes}, {target[axis] for axis in axes}
    if all(mesh[axis] == 1 for axis in axes):
        return StepKind.LOCAL if len(axes) == 1 else None
    (one, *more), (to, *others) = before, after
    splits = all(isinstance(entry, Split) for entry in before)
    to_splits = all(isinstance(entry, Split) for entry in after)
    to_copies = not others and isinstance(to, Broadcast)
    if isinstance(one, Partial):
        inner = [entry for entry in source[axes[0] :] if isinstance(entry, Partial)]
        if more or any(entry != one for entry in inner):
            return None
        if to_copies:
            return StepKind.ALL_REDUCE
        return StepKind.REDUCE_SCATTER if to_splits else None
    if splits and to_copies:
        return StepKind.ALL_GATHER
    if splits and to_splits:
        return StepKind.ALL_TO_ALL
    if len(axes) == 1 and (isinstance(one, Broadcast) or (splits and to == Partial())):
        return StepKind.LOCAL
    return None


@dataclass(frozen=True)
class Oracle:
    """The best price between any two states.

    Args:
        states: The states.
        bytes_of_four: Of the best sequence of up to 4 steps.
        bytes, memory, effort: Of the best sequence from one state (row) to another (column).
        crossings: Each step to another placement: from which state, to which, and its bytes.
    """

    states: list[State]
    bytes_of_four: Ints
    bytes: Ints
    memory: Ints
    effort: Ints
    crossings: Ints

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        dtype: str,
        placements: Sequence[Placement],
        reductions: Sequence[str] = ("sum", "max", "min"),
    ) -> Oracle:
        """Try all sequences of up to 8 steps among the states of some placements.

        Steps lead from each placement to itself and to later ones.
        """
        states = [
            (placement, sbp)
            for placement in placements
            for sbp in all_nd_sbps(len(shape), placement.num_axes, reductions)
        ]
        size = (len(states), len(states))
        layers: list[tuple[int, int, int, int, int]] = []
        for (i, source), (j, target) in product(enumerate(states), repeat=2):
            if placements.index(source[0]) <= placements.index(target[0]):
                for step in single_steps(shape, dtype, source, target):
                    held = max(step_memory_bytes(step).values())
                    layers.append((i, j, step.size_bytes, held, effort([step])))
        steps = np.array(layers, dtype=np.int64).reshape(-1, 5)
        best = np.full(size, NEVER, dtype=np.int64)
        memory, least = best.copy(), best.copy()
        four = _closure(_lengths(steps, size), doublings=2)
        total = _closure(four, doublings=1) // _SCALE
        for bound in np.unique(steps[:, 3]):
            within = _closure(_lengths(steps[steps[:, 3] <= bound], size), doublings=3)
            new = (within < NEVER) & (within // _SCALE == total) & (memory == NEVER)
            memory[new] = bound
            least[new] = within[new] % _SCALE
        crosses = [states[i][0] != states[j][0] for i, j in steps[:, :2]]
        return cls(states, four // _SCALE, total, memory, least, steps[crosses, :3])

    def best(self, source: State, target: State) -> tuple[int, int, int]:
        """Return (bytes, memory, effort) of the best sequence between two different states."""
        at = self.states.index(source), self.states.index(target)
        return int(self.bytes[at]), int(self.memory[at]), int(self.effort[at])

    def fewest_between(self, source: State, target: State) -> int:
        """Return the fewest bytes between two placements of any sequence of the fewest bytes."""
        start, end = self.states.index(source), self.states.index(target)
        leaves, arrives, moved = self.crossings.T
        total = self.bytes[start, leaves] + moved + self.bytes[arrives, end]
        return int(moved[total == self.bytes[start, end]].min())


def price(found: Route) -> tuple[int, int, int]:
    """Return (bytes, memory, effort) of a route, all of it counted again from its steps."""
    moved = 0
    for step in found.steps:
        transfer = step.kind is StepKind.TRANSFER
        moved += transfer_bytes(step) if transfer else collective_bytes(step)
    held = max((_memory_bytes(step) for step in found.steps), default=0)
    return moved, held, effort(found.steps)


@lru_cache(maxsize=200_000)
def _memory_bytes(step: BoxingStep) -> int:
    return max(step_memory_bytes(step).values())


def _lengths(steps: Ints, size: tuple[int, int]) -> Ints:
    lengths = np.full(size, NEVER, dtype=np.int64)
    np.minimum.at(lengths, (steps[:, 0], steps[:, 1]), steps[:, 2] * _SCALE + steps[:, 4])
    np.fill_diagonal(lengths, 0)
    return lengths


def _closure(lengths: Ints, doublings: int) -> Ints:
    for _ in range(doublings):
        lengths = np.stack([(row[:, None] + lengths).min(axis=0) for row in lengths])
        lengths = np.minimum(lengths, NEVER)
    return lengths
