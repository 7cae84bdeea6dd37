"""Other plans of a step with one pin more, of which the faster one counts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from test_rows import found_plan
from trainable import registry, run_config, run_of

from sbp_core.errors import ConfigError
from sbp_core.infer import PinValue
from sbp_core.sbp import NdSbp
from sbp_launch.explaining.alternatives import (
    MatchedTensors,
    alternative,
    holds,
    tensors_of,
    used_sbps,
    values_of,
)
from sbp_launch.planning.flow import Planned
from sbp_launch.trainer.planned import planner_of
from sbp_launch.trainer.run_program import make_program

PIN = ("head.weight", "S(0)")


@pytest.mark.slow
def test_a_parameter_is_stored_a_module_and_a_use_are_used() -> None:
    graph = found_plan("replicated").graph

    assert tensors_of(graph, "head.weight") == MatchedTensors(stored=("head.weight",), used=())
    assert tensors_of(graph, "use:head.weight") == MatchedTensors(stored=(), used=("head.weight",))
    assert tensors_of(graph, "embed").used
    with pytest.raises(ConfigError, match="matches no tensor"):
        tensors_of(graph, "heda")


@pytest.mark.slow
def test_how_tensors_are_cut_in_a_plan_is_read_from_its_strategy() -> None:
    for name, expected in (("replicated", "B"), ("sharded", "S(0)")):
        planned = found_plan(name)
        tensors = MatchedTensors(stored=("head.weight",), used=())

        assert used_sbps(planned.graph, planned.strategy, tensors) == [NdSbp.parse(expected)]


@pytest.mark.slow
def test_every_way_is_looked_at_on_few_axes_and_one_axis_at_a_time_on_many() -> None:
    planned = found_plan("two axes")
    stored = MatchedTensors(stored=("head.weight",), used=())
    used = MatchedTensors(stored=(), used=("head.weight",))
    one, two = NdSbp.parse("B"), NdSbp.parse("B, B")
    (stage,) = planned.strategy.stages

    assert values_of(planned.graph, [found_plan("replicated").strategy.stages[0]], used, one) == [
        "B", "S(0)", "S(1)", "P",
    ]  # fmt: skip
    assert len(values_of(planned.graph, [stage], stored, two)) == 9
    assert len(values_of(planned.graph, [stage], used, two)) == 16


def replan(pins: Mapping[str, PinValue]) -> Planned:
    run = run_of(run_config())
    return planner_of(run, make_program(run)).plan(pins)


@pytest.mark.slow
def test_an_alternative_keeps_its_pin_and_is_the_faster_of_two_plans() -> None:
    planned = found_plan("replicated")

    nearby = alternative(planned, *PIN, None)
    both = alternative(planned, *PIN, replan)

    assert nearby.planned is not None and both.planned is not None
    assert nearby.modules == ("head",)
    assert not holds(planned, *PIN)
    assert holds(nearby.planned, *PIN) and holds(both.planned, *PIN)
    assert nearby.figures is not None and both.figures is not None
    times_s = [nearby.figures.step_s, replan(dict([PIN])).simulation.step_s]
    assert both.figures.step_s == pytest.approx(min(times_s))


def test_what_nothing_can_hold_is_refused_with_what_is_accepted() -> None:
    found = alternative(found_plan("replicated"), "embed", "S(9)", None)

    assert found.planned is None
    assert found.refused is not None and found.refused.accepted


def test_a_planner_that_heeds_no_pins_leaves_what_is_nearby() -> None:
    planned = found_plan("replicated")

    found = alternative(planned, *PIN, lambda pins: planned)

    assert found.modules == ("head",)


def test_pins_of_a_request_reach_the_planner() -> None:
    assert str(replan({"head.weight": "S(0)"}).strategy.storage["head.weight"].sbp) == "S(0)"
    assert registry().make("planner", "even")
