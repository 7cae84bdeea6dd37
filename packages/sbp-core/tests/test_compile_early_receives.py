"""Which receives a thread asks for ahead of their firings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sbp_core.compile import RankPlan, early_receives
from sbp_core.compile.actors import Compute, Receive
from sbp_core.graph.ir import Phase, Rate

_WHAT = {"stage": 0, "phase": Phase.FORWARD, "rate": Rate.MICRO, "thread": "compute"}


def _part(kinds: str) -> RankPlan:
    """Return a rank that receives (r), receives beside a shard of its own (R) or computes (c)."""
    actors = (
        Receive(name="r", step=0, makes="x", **_WHAT),  # type: ignore[arg-type]
        Receive(name="R", step=0, makes="y", inputs=("own",), **_WHAT),  # type: ignore[arg-type]
        Compute(name="c", instructions=(), **_WHAT),  # type: ignore[arg-type]
    )
    order = tuple((kind, kinds[:place].count(kind)) for place, kind in enumerate(kinds))
    return RankPlan(rank=0, slots=(), actors=actors, registers=(), orders={"compute": order})


def test_a_run_is_asked_for_behind_the_run_before() -> None:
    assert early_receives(_part("ccrccrrcr"), "compute") == {0: (2,), 3: (5, 6), 7: (8,)}


def test_what_needs_a_shard_of_its_own_rank_is_not_early() -> None:
    assert early_receives(_part("cRcr"), "compute") == {2: (3,)}


@given(st.text("rRc", max_size=12))
def test_each_receive_is_asked_for_once_and_not_before_the_run_before_has_come(kinds: str) -> None:
    found = early_receives(_part(kinds), "compute")

    asked = [receive for receives in found.values() for receive in receives]
    assert sorted(asked) == [place for place, kind in enumerate(kinds) if kind == "r"]
    for place, receives in found.items():
        for receive in receives:
            between = kinds[place:receive].lower()
            # Behind the end of a run, or at the start; and no other run lies in between.
            assert place == 0 or kinds[place - 1] in "rR"
            assert "r" not in between.rstrip("r")
