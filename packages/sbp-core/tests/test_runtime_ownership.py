"""Every element of every state is owned once, owners are loaded evenly, and routes arrive."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.boxing import Bounds, StepKind, bounds_of, itemsize, volume
from sbp_core.compile.physical import PhysicalPlan, RankPlan, StateSlot
from sbp_core.errors import SbpLookupError
from sbp_core.graph import InputKind
from sbp_core.placement import Placement
from sbp_core.runtime import (
    counted_apart,
    gather_routes,
    known_state,
    lost_states,
    ownership,
    state_owners,
    state_slots,
    widened,
)
from sbp_core.sbp import B, NdSbp, S, local_shape

#: Meshes of stages: their ranks overlap, nest, and lie apart.
MESHES = (
    Placement([0], ("data",)),
    Placement([0, 1, 2], ("data",)),
    Placement([2, 3], ("data",)),
    Placement([[0, 1], [2, 3]], ("data", "tensor")),
    Placement([[5, 4], [1, 0]], ("data", "tensor")),
    Placement([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("replica", "data", "tensor")),
)


def plan_of(
    stages: list[Placement], states: list[tuple[int, NdSbp, tuple[int, ...]]]
) -> PhysicalPlan:
    """Return a plan with no actors, of states s0, s1, ... and one step counter of two of them."""
    ranks = sorted({rank for stage in stages for rank in stage.rank_list})

    def slots(rank: int) -> tuple[StateSlot, ...]:
        held = [
            StateSlot(
                name=f"s{index}",
                kind=InputKind.PARAMETER,
                shape=shape,
                dtype="float32" if index % 2 else "float64",
                stage=stage,
                sbp=sbp,
                local_shape=local_shape(
                    shape, sbp, stages[stage].mesh_shape, stages[stage].coordinate(rank)
                ),
            )
            for index, (stage, sbp, shape) in enumerate(states)
            if rank in stages[stage]
        ]
        counter = StateSlot(
            name="count",
            kind=InputKind.OPTIMIZER_STATE,
            shape=(),
            dtype="int64",
            stage=0,
            sbp=None,
            local_shape=(),
        )
        return (*held, counter)

    return PhysicalPlan(
        graph_hash="",
        planner="",
        num_micro_batches=1,
        ties={"count": ("s0.count", "s1.count")},
        stages=tuple(stages),
        steps=(),
        links=(),
        ranks=tuple(
            RankPlan(rank=rank, slots=slots(rank), actors=(), registers=(), orders={})
            for rank in ranks
        ),
    )


@st.composite
def plans(draw: st.DrawFn) -> PhysicalPlan:
    stages = draw(st.lists(st.sampled_from(MESHES), min_size=1, max_size=3))
    states = []
    for _ in range(draw(st.integers(1, 6))):
        stage = draw(st.integers(0, len(stages) - 1))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        entries = st.sampled_from([B, *(S(dim) for dim in range(len(shape)))])
        sbp = NdSbp(*(draw(entries) for _ in range(stages[stage].num_axes)))
        states.append((stage, sbp, shape))
    return plan_of(stages, states)


@given(plans(), st.sampled_from([4, 16, 100, 2**20]))
def test_every_element_is_owned_once_by_a_rank_that_holds_it(
    plan: PhysicalPlan, share_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "SHARE_BYTES", share_bytes)
        owners = state_owners(plan)

    assert owners.keys() == state_slots(plan).keys()
    for name, slot in state_slots(plan).items():
        if slot.sbp is None:
            assert owners[name] == {plan.ranks[0].rank: ()}
            continue
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
        assert owners[name], name
        for rank, bounds in owners[name].items():
            dims = zip(bounds, held[rank], strict=True)
            assert all(first <= start <= stop <= last for (start, stop), (first, last) in dims)
        elements = [
            element
            for bounds in owners[name].values()
            for element in product(*(range(*dim) for dim in bounds))
        ]
        assert len(elements) == len(set(elements)) == prod(slot.shape)
        assert all(map(volume, owners[name].values())) or len(owners[name]) == 1


@given(plans(), st.data())
def test_what_is_left_owns_every_element_once_or_it_is_known_to_be_lost(
    plan: PhysicalPlan, data: st.DataObject
) -> None:
    left = data.draw(st.sets(st.sampled_from(sorted(plan.by_rank)), min_size=1))

    owners, lost = state_owners(plan, left), lost_states(plan, left)

    for name, slot in state_slots(plan).items():
        assert owners[name].keys() <= left
        if slot.sbp is None:
            assert list(owners[name].values()) == [()]
            continue
        elements = [
            element
            for bounds in owners[name].values()
            for element in product(*(range(*dim) for dim in bounds))
        ]
        assert len(elements) == len(set(elements))
        assert (name in lost) == (len(elements) < prod(slot.shape))
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
        assert all(volume(held[rank]) and rank not in left for rank in lost.get(name, ()))
    assert state_owners(plan, plan.by_rank) == state_owners(plan)


@given(plans())
def test_no_owner_could_hand_a_slice_to_a_less_loaded_holder(plan: PhysicalPlan) -> None:
    loads = dict.fromkeys(plan.by_rank, 0)
    dealt: list[tuple[int, str, Bounds, int]] = []
    for name, owners in state_owners(plan).items():
        slot = state_slots(plan)[name]
        for rank, bounds in owners.items():
            size = 0 if slot.sbp is None else volume(bounds) * itemsize(slot.dtype)
            loads[rank] += size
            if size:
                dealt.append((-size, name, bounds, rank))

    last = {rank: (name, bounds, -size) for size, name, bounds, rank in sorted(dealt)}
    for rank, (name, bounds, size) in last.items():
        slot = state_slots(plan)[name]
        assert slot.sbp is not None
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
        for other in plan.by_rank:
            if held.get(other) == bounds:
                assert loads[rank] - size <= loads[other]


def test_replicas_are_spread_by_their_size() -> None:
    pair, whole = MESHES[2], NdSbp(B)
    plan = plan_of([pair], [(0, whole, (8, 2)), (0, whole, (4, 4)), (0, NdSbp(S(0)), (3, 2))])

    owners = state_owners(plan)

    # s1 is float32, so half the size of s0, and of s2 rank 2 holds two rows, rank 3 one.
    assert owners["s0"] == {2: ((0, 8), (0, 2))}
    assert owners["s1"] == {3: ((0, 4), (0, 4))}
    assert owners["s2"] == {2: ((0, 2), (0, 2)), 3: ((2, 3), (0, 2))}


def test_a_large_replica_is_owned_in_even_parts() -> None:
    three, whole = MESHES[1], NdSbp(B)
    rows = 3 * ownership.SHARE_BYTES // 8 // 4 + 1  # of four float64
    plan = plan_of([three], [(0, whole, (rows, 4)), (0, whole, (7,)), (0, whole, (1, 2 * 2**20))])

    owners = state_owners(plan)

    third = rows // 3
    assert sorted(owners["s0"].values()) == [
        ((0, third), (0, 4)),
        ((third, 2 * third), (0, 4)),
        ((2 * third, rows), (0, 4)),
    ]
    assert len(owners["s1"]) == 1
    # Two shares.
    assert list(owners["s2"].values()) == [((0, 1), (0, 2**20)), ((0, 1), (2**20, 2 * 2**20))]


def arrives(plan: PhysicalPlan, name: str, to: int | None) -> bool:
    """Whether a route begins as the state is stored, goes on from where it is, and ends whole."""
    slot = state_slots(plan)[name]
    assert slot.sbp is not None
    stored = (plan.stages[slot.stage], slot.sbp)
    held = dict.fromkeys(stored[0].rank_list, stored)
    for steps in gather_routes(plan, name, to):
        now = held.copy()
        for step in steps:
            assert all(now[rank] == step.source for rank in step.source[0].rank_list)
            now |= dict.fromkeys(step.target[0].rank_list, step.target)
            assert step.kind is StepKind.TRANSFER or step.source[0] == step.target[0]
        # Nobody gets what is whole there already.
        assert not any(
            held[rank][1].is_broadcast for rank in steps[-1].target[0].rank_list if rank in held
        )
        held |= {rank: now[rank] for rank in steps[-1].target[0].rank_list}
    wanted = plan.by_rank if to is None else [to]
    return all(held[rank][1].is_broadcast for rank in wanted)


@pytest.mark.slow
@given(plans(), st.data())
def test_a_route_brings_a_state_to_one_rank_or_to_all(
    plan: PhysicalPlan, data: st.DataObject
) -> None:
    to = data.draw(st.sampled_from([None, *plan.by_rank]))
    for name, slot in state_slots(plan).items():
        if slot.sbp is None:
            assert gather_routes(plan, name, to) == ()
        elif prod(slot.shape):
            assert arrives(plan, name, to)


def test_what_is_not_there_is_refused_with_the_nearest_name() -> None:
    plan = plan_of([MESHES[1]], [(0, NdSbp(B), (4,))])

    assert known_state(plan, "s1.count") == "count"
    with pytest.raises(SbpLookupError, match=r"(?s)no state is called 's1.coumt'.*'s1.count'"):
        known_state(plan, "s1.coumt")
    with pytest.raises(SbpLookupError, match=r"(?s)no rank 9.*one of 0, 1, 2; None for all"):
        gather_routes(plan, "s0", 9)


def tied(plan: PhysicalPlan, ties: dict[str, tuple[str, ...]]) -> PhysicalPlan:
    """Return a plan with other host numbers."""

    def slots(part: RankPlan) -> tuple[StateSlot, ...]:
        (number,) = (slot for slot in part.slots if slot.sbp is None)
        others = tuple(slot for slot in part.slots if slot.sbp is not None)
        return (*others, *(replace(number, name=name) for name in ties))

    return replace(
        plan, ties=ties, ranks=tuple(replace(part, slots=slots(part)) for part in plan.ranks)
    )


def names_of(plan: PhysicalPlan) -> list[str]:
    return [state for name in state_slots(plan) for state in plan.ties.get(name, (name,))]


@st.composite
def ties(draw: st.DrawFn, prefix: str) -> dict[str, tuple[str, ...]]:
    """Draw which of six counters there are, and which of them one number stands for."""
    groups = draw(st.lists(st.integers(-1, 2), min_size=6, max_size=6))
    found: dict[str, tuple[str, ...]] = {}
    for counter, group in enumerate(groups):
        if group >= 0:
            found[f"{prefix}{group}"] = (*found.get(f"{prefix}{group}", ()), f"w{counter}.step")
    return found


@given(ties("a"), ties("b"), st.integers(0, 3), st.integers(0, 3))
def test_a_widened_plan_has_all_states_once_and_counts_as_the_other(
    own: dict[str, tuple[str, ...]], theirs: dict[str, tuple[str, ...]], few: int, many: int
) -> None:
    stages = [MESHES[1]]
    states = [(0, NdSbp(S(0)), (6,)), (0, NdSbp(B), (2,)), (0, NdSbp(S(0)), (3, 2))]
    plan, other = (
        tied(plan_of(stages, states[:few]), own),
        tied(plan_of(stages, states[:many]), theirs),
    )

    made = widened(plan, other)

    assert len(names_of(made)) == len(set(names_of(made)))
    assert set(names_of(made)) == {*names_of(plan), *names_of(other)}
    assert all(made.ties[name] == members for name, members in other.ties.items())
    apart = widened(made, counted_apart(made))
    assert set(names_of(apart)) == set(names_of(made))
    assert all(len(members) == 1 for members in apart.ties.values())
    for part, before in zip(made.ranks, plan.ranks, strict=True):
        assert set(before.slots) - set(part.slots) <= {s for s in before.slots if s.sbp is None}
