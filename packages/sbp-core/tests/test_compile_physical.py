from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sbp_core.compile import compile_plan
from sbp_core.compile.physical import PLAN, PhysicalPlan
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import Symbol, repetitions
from sbp_core.placement import Placement
from sbp_core.serialize import Document
from sbp_core.testing.plans import data_parallel_plan, diamond, pipeline_plan, strategy_of


def _through_text(plan: PhysicalPlan) -> PhysicalPlan:
    return PLAN.load(json.loads(json.dumps(Document.dump(PLAN, plan))))


@pytest.mark.parametrize(
    "plan",
    [
        data_parallel_plan(),
        pipeline_plan(3, (2, 1)),
        pipeline_plan(2, (2, 2), mesh=Placement.grid((2, 2), ("pipe", "data"))),
    ],
    ids=["data parallel", "pipeline", "pipeline of data parallel stages"],
)
def test_a_plan_survives_json(plan: PhysicalPlan) -> None:
    copy = _through_text(plan)

    assert copy == plan
    assert copy.hash == plan.hash


def test_symbols_and_keywords_of_instructions_survive_json() -> None:
    graph = diamond()
    first, *rest = graph.nodes
    first = replace(first, kwargs={"dtype": Symbol("dtype", "float32"), "scale": float("inf")})
    plan = compile_plan(graph, strategy_of(replace(graph, nodes=(first, *rest))))

    assert _through_text(plan) == plan


def test_the_hash_changes_with_every_part_of_the_plan() -> None:
    plan = pipeline_plan(2, (2, 1))
    part = plan.ranks[0]
    order = {name: firings[::-1] for name, firings in part.orders.items()}
    ranks = [
        replace(part, orders=order),
        replace(part, registers=(replace(part.registers[0], quota=7), *part.registers[1:])),
        replace(part, actors=part.actors[1:]),
        replace(part, slots=part.slots[1:]),
    ]
    others = [replace(plan, ranks=(other, *plan.ranks[1:])) for other in ranks]
    others += [
        replace(plan, links=plan.links[1:]),
        replace(plan, planner="other"),
        replace(plan, ties={"step_counter": ("a",)}),
    ]

    assert len({plan.hash, *(other.hash for other in others)}) == 1 + len(others)


def test_another_format_is_refused() -> None:
    with pytest.raises(SbpValueError, match="this is no plan file"):
        PLAN.load({})


def test_actors_and_registers_can_be_looked_up() -> None:
    part = pipeline_plan(2, (2, 1)).by_rank[1]

    assert part.by_name["forward.1.1"].num_firings(repetitions(5, 1)) == 5
    assert part.by_name["optimizer.1.1"].num_firings(repetitions(5, 1)) == 1
    taken = [r.name for r in part.inputs_of["backward.1.1"]]
    assert "forward.1.1#0" in taken
    assert [r.producer for r in part.outputs_of["forward.1.1"]] == ["forward.1.1"] * 2


def test_ranks_that_are_alike_are_written_once_and_share_what_is_read(tmp_path: Path) -> None:
    plan = pipeline_plan(4, (2, 1), mesh=Placement.grid((2, 4), ("pipe", "data")))
    path = tmp_path / "plan.json"

    PLAN.write(plan, path)
    found = PLAN.read(path)

    written = json.loads(path.read_text("utf-8"))
    assert [part["rank"] for part in written["ranks"]] == [0, 4]
    assert written["like"] == {"1": 0, "2": 0, "3": 0, "5": 4, "6": 4, "7": 4}
    assert found == plan
    assert found.hash == plan.hash
    assert found.by_rank[3].actors is found.by_rank[0].actors


def test_a_plan_that_lists_every_rank_is_the_same_plan() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=Placement.grid((2, 2), ("pipe", "data")))

    found = PLAN.load(Document.dump(PLAN, plan))

    assert len(Document.dump(PLAN, plan)["ranks"]) == 4
    assert found == plan
    assert found.hash == plan.hash


@pytest.mark.parametrize(
    "like",
    [
        {"0": 4},
        {"1": 2},
        {"1": "0"},
        {"one": 0},
        {"-1": 0},
        {"01": 0},
        {"9" * 5000: 0},
        [1],
        {"1": 1},
    ],
)
def test_a_rank_like_one_that_is_not_listed_is_refused(like: object) -> None:
    plan = pipeline_plan(4, (2, 1), mesh=Placement.grid((2, 4), ("pipe", "data")))

    with pytest.raises(SbpValueError, match="like"):
        PLAN.load({**PLAN.dump(plan), "like": like})


def test_a_rank_that_differs_is_written_by_itself() -> None:
    plan = pipeline_plan(4, (2, 1), mesh=Placement.grid((2, 2), ("pipe", "data")))
    first, second, *others = plan.ranks
    quotas = tuple(replace(register, quota=9) for register in second.registers)
    changed = replace(plan, ranks=(first, replace(second, registers=quotas), *others))

    assert changed.alike == {0: 0, 1: 1, 2: 2, 3: 2}
    assert PLAN.load(PLAN.dump(changed)) == changed
    assert changed.hash != plan.hash
