"""A store that is given the states of another plan keeps what it has where it is."""

from __future__ import annotations

import pytest
import torch

from sbp_core.compile import PhysicalPlan
from sbp_core.compile.physical import RankPlan, StateSlot
from sbp_core.errors import SbpValueError
from sbp_core.graph import InputKind
from sbp_core.placement import Placement
from sbp_core.runtime import counted_apart
from sbp_core.sbp import B, NdSbp, S
from sbp_torch.runtime.store import StateStore

SPLIT, WHOLE = NdSbp(S(0)), NdSbp(B)


def plan_of(tensors, numbers):
    """Return a plan of two ranks without actors.

    Args:
        tensors: SBP of states of shape (4,) by name.
        numbers: States that each host number stands for, by its name.
    """
    kind = InputKind.OPTIMIZER_STATE

    def slot(name, sbp):
        shape = () if sbp is None else (4,)
        local = (2,) if sbp == SPLIT else shape
        return StateSlot(
            name=name, kind=kind, shape=shape, dtype="float32", stage=0, sbp=sbp, local_shape=local
        )

    slots = tuple(slot(name, sbp) for name, sbp in (tensors | dict.fromkeys(numbers)).items())
    return PhysicalPlan(
        graph_hash="",
        planner="",
        num_micro_batches=1,
        ties=numbers,
        stages=(Placement([0, 1], ("data",)),),
        steps=(),
        links=(),
        ranks=tuple(
            RankPlan(rank=rank, slots=slots, actors=(), registers=(), orders={}) for rank in (0, 1)
        ),
    )


def store_of(plan):
    """Return a store of both ranks, in which each state has values of its own."""
    store = StateStore(plan, [0, 1])
    numbers = {name: torch.tensor(7.0) for name in store.layout.numbers}
    whole = {
        name: torch.arange(4.0) + 10 * index
        for index, name in enumerate(store.layout.names)
        if name not in numbers
    }
    store.load({**whole, **numbers})
    return store


FIRST = plan_of({"a": SPLIT, "b": WHOLE}, {"count": ("a.step", "b.step")})


def test_new_states_are_cut_and_the_others_are_the_same_tensors():
    store = store_of(FIRST)
    before = {rank: dict(held) for rank, held in store.values.items()}
    more = plan_of({"a": SPLIT, "c": SPLIT}, {"count": ("a.step", "b.step"), "d": ("c.step",)})

    store.widen(more, {"c": torch.arange(4.0) + 50, "c.step": torch.tensor(0.0)})

    assert set(store.layout.names) == {"a", "b", "c", "a.step", "b.step", "c.step"}
    for rank, held in before.items():
        assert all(store.values[rank][name] is value for name, value in held.items())
    assert store.values[1]["c"].tolist() == [52, 53]
    assert store.whole("c").tolist() == [50, 51, 52, 53] and store.whole("c.step") == 0
    pieces = {(one.name, one.bounds) for one in store.pieces()}
    assert {name for name, _ in pieces} == set(store.layout.names)


def test_a_number_that_stood_for_two_states_is_two_numbers():
    store = store_of(FIRST)

    store.widen(plan_of({}, {"only": ("a.step",)}), {})
    store.values[0]["only"] = store.values[1]["only"] = 9.0

    assert (store.whole("a.step"), store.whole("b.step")) == (9, 7)
    store.widen(counted_apart(store.plan), {})
    assert (store.whole("a.step"), store.whole("b.step")) == (9, 7)
    assert len(store.layout.numbers) == len(set(store.layout.numbers.values())) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "'c' is missing"),
        ({"c": torch.zeros(5)}, r"shape \(5,\)"),
        ({"c": torch.zeros(4, dtype=torch.int64)}, "int64"),
    ],
)
def test_what_does_not_fit_leaves_the_store_as_it_was(given, told):
    store = store_of(FIRST)
    layout, values = store.layout, store.values

    with pytest.raises(SbpValueError, match=told):
        store.widen(plan_of({"c": SPLIT}, {}), given)

    assert store.layout is layout and store.values is values


def test_numbers_that_differ_are_not_made_one():
    store = store_of(FIRST)

    with pytest.raises(SbpValueError, match="are not one number"):
        store.widen(
            plan_of({}, {"count": ("a.step", "b.step", "c.step")}), {"c.step": torch.tensor(1.0)}
        )
