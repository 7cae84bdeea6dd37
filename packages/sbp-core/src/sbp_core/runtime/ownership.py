"""Ownership of states: which rank saves which part of a state, if several ranks hold it.

It depends on the plan alone, so all ranks know it without communication. Over all ranks, every
element of every state is owned exactly once. Checkpoints and snapshots save these parts. Two states
on three ranks, the first split, the second replicated:

    rank 0   w rows 0-1   b            owns  w rows 0-1
    rank 1   w rows 2-3   b            owns  w rows 2-3
    rank 2   w row 4      b            owns  w row 4, b

If several ranks hold a slice of several times `SHARE_BYTES`, each owns a part of it:

    rank 0   t rows 0-999              owns  t rows 0-499
    rank 1   t rows 0-999              owns  t rows 500-999

The module also extends a plan by the states of another plan (`widened`), and finds the boxing steps
that gather a whole state (`gather_routes`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from sbp_core.boxing import Bounds, bounds_of, itemsize, route, volume
from sbp_core.errors import SbpLookupError, suggestion
from sbp_core.graph import InputKind
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp

if TYPE_CHECKING:
    from sbp_core.boxing import BoxingStep
    from sbp_core.compile.physical import PhysicalPlan, RankPlan, StateSlot
    from sbp_core.tensor import Tensor


#: Least bytes of a part for which a slice is divided among several owners.
SHARE_BYTES = 8 * 2**20


#: A host number.
Number = float | int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlice:
    """The part of a state that a rank owns.

    Args:
        name: The name of the state, one of `Session.state_dict`.
        shape, dtype: The shape and dtype of the whole state.
        bounds: The position of the part in the state: (start, stop) of each dim.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bounds: Bounds

    def with_value(self, value: Tensor | Number) -> StatePiece:
        """Return the piece of this slice with its value."""
        return StatePiece(
            name=self.name, shape=self.shape, dtype=self.dtype, bounds=self.bounds, value=value
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePiece(StateSlice):
    """The part of a state that a rank owns, with its value.

    Args:
        name, shape, dtype, bounds: As in `StateSlice`.
        value: The part, of shape `stop - start`, without a copy: a later step may overwrite it. For
            a state that ranks keep as a host number, the number.
    """

    value: Tensor | Number


def state_slots(plan: PhysicalPlan) -> dict[str, StateSlot]:
    """Return a slot of every state of a plan, by the name that the state has on the ranks."""
    return {
        slot.name: slot
        for part in plan.ranks
        for slot in part.slots
        if InputKind(slot.kind).is_state
    }


def state_owners(
    plan: PhysicalPlan, among: Collection[int] | None = None
) -> Mapping[str, Mapping[int, Bounds]]:
    """Return the owners of every state, each with the slice that it owns.

    A slice that several ranks hold is owned by one of them, or in even parts by some. Slices and
    parts are assigned from the largest to the smallest, each to the holder that owns fewest bytes
    so far. A rank owns at most one slice of a state, among those that it holds; empty slices have
    no owner, unless the whole state is empty.

    Args:
        plan: The plan.
        among: The ranks that can own, if some ranks are lost; slices that none holds have no owner.
            All if None.

    Returns:
        By the names of `state_slots`, bounds by rank. Host numbers have no dims and so no bounds;
        the first rank owns them.
    """
    owners = [part.rank for part in plan.ranks if among is None or part.rank in among]
    found: dict[str, dict[int, Bounds]] = {name: {} for name in state_slots(plan)}
    slices: list[tuple[int, str, Bounds, list[int]]] = []
    for name, slot in state_slots(plan).items():
        if slot.sbp is None:
            found[name] |= dict.fromkeys(owners[:1], ())
            continue
        holders: dict[Bounds, list[int]] = {}
        for rank, bounds in bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp).items():
            if rank in owners:
                holders.setdefault(bounds, []).append(rank)
        filled = {bounds: ranks for bounds, ranks in holders.items() if volume(bounds)}
        for bounds, ranks in (filled or dict(list(holders.items())[:1])).items():
            for part in _parts(bounds, itemsize(slot.dtype), len(ranks)):
                slices.append((volume(part) * itemsize(slot.dtype), name, part, ranks))
    loads = dict.fromkeys(owners, 0)
    for size_bytes, name, bounds, ranks in sorted(slices, key=lambda entry: (-entry[0], entry[1:])):
        # There are as many holders as parts, or more.
        owner = min((r for r in ranks if r not in found[name]), key=loads.__getitem__)
        loads[owner] += size_bytes
        found[name][owner] = bounds
    return found


def lost_states(plan: PhysicalPlan, among: Collection[int]) -> Mapping[str, Sequence[int]]:
    """Return the states that some ranks do not hold all of, each with the ranks that have the rest.

    Args:
        plan: The plan.
        among: The ranks that remain.
    """
    lost: dict[str, list[int]] = {}
    for name, slot in state_slots(plan).items():
        if slot.sbp is None:
            continue
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
        left = {bounds for rank, bounds in held.items() if rank in among}
        rest = [rank for rank, bounds in held.items() if volume(bounds) and bounds not in left]
        if rest:
            lost[name] = rest
    return lost


def _parts(bounds: Bounds, item_bytes: int, num_holders: int) -> Iterator[Bounds]:
    """Yield even, contiguous parts of a slice, at most one for each holder."""
    dim = next((d for d, (start, stop) in enumerate(bounds) if stop - start > 1), None)
    if dim is None:
        yield bounds
        return
    start, stop = bounds[dim]
    shares = ceil(volume(bounds) * item_bytes / SHARE_BYTES)
    count = max(1, min(num_holders, shares, stop - start))
    cuts = [start + (stop - start) * turn // count for turn in range(count + 1)]
    for span in pairwise(cuts):
        yield (*bounds[:dim], span, *bounds[dim + 1 :])


def widened(plan: PhysicalPlan, other: PhysicalPlan) -> PhysicalPlan:
    """Return a plan whose ranks also hold the states of another plan; their work is unchanged.

    If the other plan keeps a state differently (by another host number, or by a host number in
    place of a tensor without dims), the returned plan keeps it as the other plan does.

    Args:
        plan: The plan to extend.
        other: A plan for the same ranks and stages. A state of both is stored alike.
    """
    own, theirs = state_slots(plan), state_slots(other)
    moved = {
        state for name, tied in other.ties.items() if plan.ties.get(name) != tied for state in tied
    }
    left = {
        name: tuple(state for state in tied if state not in moved)
        for name, tied in plan.ties.items()
    }
    gone = {name for name, tied in left.items() if not tied and name not in theirs}
    gone |= moved & own.keys()

    def held(part: RankPlan) -> Iterator[StateSlot]:
        yield from (slot for slot in part.slots if slot.name not in gone)
        for slot in other.by_rank[part.rank].slots:
            if InputKind(slot.kind).is_state and slot.name not in own:
                yield slot

    ties = {**{name: tied for name, tied in left.items() if tied}, **other.ties}
    return replace(_with_slots(plan, held), ties=ties)


def _with_slots(
    plan: PhysicalPlan, held: Callable[[RankPlan], Iterator[StateSlot]]
) -> PhysicalPlan:
    ranks = tuple(replace(part, slots=tuple(held(part))) for part in plan.ranks)
    return replace(plan, ranks=ranks)


def with_states_of(
    plan: PhysicalPlan, like: Mapping[str, tuple[str, tuple[int, ...], str]]
) -> PhysicalPlan:
    """Return a plan whose ranks hold further states, for `widened`.

    Args:
        plan: The plan to extend.
        like: For the name of each new state, the existing state that it belongs to, its shape and
            its dtype. The ranks of that state hold it: split alike for equal shapes, else whole.
    """

    def held(part: RankPlan) -> Iterator[StateSlot]:
        yield from part.slots
        for slot in part.slots:
            for name, (of, shape, dtype) in like.items():
                if of == slot.name:
                    found = replace(slot, name=name, kind=InputKind.OPTIMIZER_STATE, dtype=dtype)
                    if shape != slot.shape:
                        whole = NdSbp(*[B for _ in slot.sbp or ()])
                        found = replace(found, shape=shape, sbp=whole, local_shape=shape)
                    yield found

    return _with_slots(plan, held)


def counted_apart(plan: PhysicalPlan) -> PhysicalPlan:
    """Return a plan in which each host number represents one state only, for `widened`."""

    def held(part: RankPlan) -> Iterator[StateSlot]:
        for slot in part.slots:
            for state in plan.ties.get(slot.name, ()):
                yield replace(slot, name=f"{slot.name}.{state}")

    ties = {f"{name}.{state}": (state,) for name, tied in plan.ties.items() for state in tied}
    return replace(_with_slots(plan, held), ties=ties)


def known_state(plan: PhysicalPlan, name: str) -> str:
    """Return the name that a state has on the ranks: one host number may represent several states.

    Raises:
        SbpLookupError: no rank has such a state.
    """
    slots = state_slots(plan)
    tied = next((host for host, names in plan.ties.items() if name in names), None)
    if tied is None and name not in slots:
        raise SbpLookupError(
            f"no state is called {name!r}",
            accepted="a name of state_dict()",
            todo=suggestion(
                name, [*slots, *(tied for names in plan.ties.values() for tied in names)]
            ),
        )
    return name if tied is None else tied


def check_destination(plan: PhysicalPlan, to: int | None) -> None:
    """Check the destination of gathered states: a rank of the plan, or all ranks (None).

    Raises:
        SbpLookupError: there is no such rank.
    """
    if to is not None and to not in plan.by_rank:
        ranks = ", ".join(map(str, plan.by_rank))
        raise SbpLookupError(f"there is no rank {to}", accepted=f"one of {ranks}; None for all")


def gather_routes(
    plan: PhysicalPlan, name: str, to: int | None
) -> tuple[tuple[BoxingStep, ...], ...]:
    """Return the boxing steps that bring a whole state to one rank, or to all.

    There are one or two routes: to the ranks of the stage that has the state, then to the ranks of
    other stages. Ranks in the target of a route's last step continue with their result; all other
    ranks continue with the value that they had before the route.

        stored (S(0)) on ranks 0, 1, for all of ranks 0 to 3
        route 0    all-gather: (S(0)) -> (B) on 0, 1
        route 1    local: (B) -> (S(0)) on 0, 1; transfer: (S(0)) on 0, 1 -> (B) on 2, 3

    Args:
        plan: The plan.
        name: The name of the state; a host number needs no step.
        to: The destination rank; all ranks if None.

    Raises:
        SbpLookupError: there is no such state or rank.
    """
    slot = state_slots(plan)[known_state(plan, name)]
    check_destination(plan, to)
    if slot.sbp is None:
        return ()
    stage = plan.stages[slot.stage]
    stored = (stage, slot.sbp)
    if to is not None:
        if slot.sbp.is_broadcast and to in stage:
            return ()
        target = (Placement([to], ("rank",), stage.device), NdSbp(B))
        return (route(slot.shape, slot.dtype, stored, target).steps,)
    whole = (stage, NdSbp(*[B] * stage.num_axes))
    routes = [route(slot.shape, slot.dtype, stored, whole).steps]
    others = [part.rank for part in plan.ranks if part.rank not in stage]
    if others:
        elsewhere = (Placement(others, ("rank",), stage.device), NdSbp(B))
        routes.append(route(slot.shape, slot.dtype, whole, elsewhere).steps)
    return tuple(steps for steps in routes if steps)
