"""Plans that carry the layout of their arenas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.check import check
from sbp_core.compile.codec import decode, encode
from sbp_core.compile.physical import from_json, to_json
from sbp_core.memory import arena, predict
from sbp_core.memory.arena import arenas, lay_out
from sbp_core.memory.report import arena_line
from sbp_torch.testing.cases import CASES, compile_case


@pytest.mark.parametrize("name", CASES)
def test_a_plan_with_its_layout_is_the_same_plan(name: str) -> None:
    plan = compile_case(name)

    laid = lay_out(plan, reads_at_once=True)

    assert laid == plan
    assert laid.hash == plan.hash
    assert check(laid) == check(plan)
    assert not plan.arenas
    assert laid.arenas == arenas(plan, reads_at_once=True)


@pytest.mark.parametrize("name", CASES)
def test_the_layout_is_stored_with_the_plan(name: str) -> None:
    laid = lay_out(compile_case(name), reads_at_once=True)

    again = decode(encode(laid))

    assert again == laid
    assert again.arenas == laid.arenas
    assert [slots.reads_at_once for slots in again.arenas.values()] == [True] * len(laid.ranks)


def test_a_plan_that_was_changed_has_no_layout() -> None:
    laid = lay_out(compile_case("accumulation"), reads_at_once=True)

    assert laid.arenas
    assert not replace(laid, planner="other").arenas
    assert not from_json(to_json(laid)).arenas


def test_a_layout_at_hand_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    laid = lay_out(compile_case("sharded states"), reads_at_once=False)
    monkeypatch.setattr(arena, "lifetimes", None)  # would be called to lay out

    found = arenas(laid, reads_at_once=False)

    assert found is laid.arenas
    # It assumes less than it may, which is right as well.
    assert arenas(laid, reads_at_once=True) is laid.arenas


def test_a_layout_for_threads_is_not_taken_for_processes() -> None:
    laid = lay_out(compile_case("sharded states"), reads_at_once=True)

    found = arenas(laid, reads_at_once=False)

    assert not any(slots.reads_at_once for slots in found.values())
    assert all(found[rank].inside < slots.inside for rank, slots in laid.arenas.items())


def test_the_prediction_is_that_of_the_layout_at_hand() -> None:
    plan = compile_case("sharded states")
    laid = lay_out(plan, reads_at_once=False)

    threads, processes = predict(plan, arena=True), predict(laid, arena=True)

    assert {r.kinds["arena"] for r in processes.ranks.values()} == {
        slots.size_bytes for slots in laid.arenas.values()
    }
    assert threads != processes


def test_a_line_says_what_arenas_take() -> None:
    laid = lay_out(compile_case("one rank"), reads_at_once=True)
    packing = laid.arenas[0].packing

    line = arena_line(laid.arenas)

    assert packing.method in line
    assert f"{packing.excess:.1%} above the lower bound" in line
