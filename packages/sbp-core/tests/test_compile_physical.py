from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sbp_core.compile import compile_plan
from sbp_core.compile.physical import PhysicalPlan, from_json, to_json
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import Symbol
from sbp_core.placement import Placement
from sbp_core.testing.plans import data_parallel_plan, diamond, pipeline_plan, strategy_of


def _through_text(plan: PhysicalPlan) -> PhysicalPlan:
    return from_json(json.loads(json.dumps(to_json(plan))))


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
        from_json({})


def test_actors_and_registers_can_be_looked_up() -> None:
    part = pipeline_plan(2, (2, 1)).by_rank[1]

    assert part.by_name["forward.1.1"].num_firings(5) == 5
    assert part.by_name["optimizer.1.1"].num_firings(5) == 1
    taken = [r.name for r in part.inputs_of["backward.1.1"]]
    assert "forward.1.1#0" in taken
    assert [r.producer for r in part.outputs_of["forward.1.1"]] == ["forward.1.1"] * 2
