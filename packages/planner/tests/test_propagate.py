"""The planner `propagate`: as fast as every preset, for any mesh, and what it does with pins."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from math import inf
from typing import Any

import pytest
import yaml
from plan_requests import assert_legal, request

import sbp_planner.propagate
from sbp_core.cluster import Link
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import infer_strategy
from sbp_core.planning import PlanRequest
from sbp_core.planning.compiled import Compilation
from sbp_core.plugins import merge_settings
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_planner import manual
from sbp_planner.configs import FIT_ANY, ManualConfig, PropagateConfig
from sbp_planner.propagate import PropagatePlanner

MESHES = [((2,), ("data",)), ((4,), ("any",)), ((2, 2), ("data", "tensor"))]


def settings_of(option: str) -> dict[str, Any]:
    """Return the settings that an option's file holds."""
    text = files("sbp_planner.conf").joinpath("planner", f"{option}.yaml").read_text("utf-8")
    settings: dict[str, Any] = yaml.safe_load(text)
    del settings["name"]
    return settings


def default() -> sbp_planner.propagate.PropagatePlanner:
    return PropagatePlanner(merge_settings(PropagateConfig, settings_of("propagate")))


def time_s(asked: PlanRequest, strategy: Strategy) -> float:
    """Return the predicted time of a step of the compiled plan."""
    options = CompileOptions(cluster=asked.cluster)
    return simulate(compile_plan(asked.graph, strategy, options)).step_s


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axes"), MESHES)
def test_it_is_as_fast_as_the_presets_for_any_model(
    mesh: tuple[int, ...], axes: tuple[str, ...]
) -> None:
    asked = request(mesh, axes)

    found = default().plan(asked)

    assert_legal(asked.graph, found)
    for option in (*(one for one in FIT_ANY if one != "propagate"), "manual/zero1", "manual/zero2"):
        preset = manual.ManualPlanner(merge_settings(ManualConfig, settings_of(option))).plan(asked)
        assert found.report["tried"]
        assert time_s(asked, found) <= time_s(asked, preset) * (1 + 1e-9), option


@pytest.mark.slow
def test_stages_and_their_schedule_are_those_of_a_pipeline() -> None:
    asked = request((2, 2), ("pipe", "data"))

    found = default().plan(asked)

    assert_legal(asked.graph, found)
    assert len(found.stages) == 2
    assert found.report["pipeline"] == "1f1b"


@pytest.mark.slow
def test_the_report_says_what_was_tried_and_the_fastest_is_taken() -> None:
    asked = request((2, 2), ("data", "tensor"))

    found = default().plan(asked)

    tried = found.report["tried"]
    assert list(tried) == list(settings_of("propagate")["pin_sets"])
    assert min(tried.values()) == pytest.approx(time_s(asked, found))
    assert all(name in found.report["explanation"][0] for name in tried)


def test_pins_that_lead_to_no_plan_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(asked: PlanRequest, *, pins: Any, **others: Any) -> Strategy:
        if pins == {"batch": "B"}:
            raise PlanError("no such plan")
        return infer_strategy(asked, pins=pins, **others)

    monkeypatch.setattr(sbp_planner.propagate, "infer_strategy", refusing)
    works, works_not = {"batch": "S(0)"}, {"batch": "B"}

    found = PropagatePlanner(PropagateConfig(pin_sets={"no": works_not, "yes": works})).plan(
        request((2,), ("data",))
    )

    assert found.report["tried"]["no"] == inf
    with pytest.raises(PlanError, match="no such plan"):
        PropagatePlanner(PropagateConfig(pin_sets={"no": works_not})).plan(request((2,), ("data",)))


@pytest.mark.slow
def test_pins_that_cannot_be_meant_are_refused_though_others_lead_to_a_plan() -> None:
    pin_sets = {"yes": {"batch": "S(0)"}, "no": {"*.atention.*": "B"}}

    with pytest.raises(ConfigError, match="atention"):
        PropagatePlanner(PropagateConfig(pin_sets=pin_sets)).plan(request((2,), ("data",)))


def within(asked: PlanRequest, memory_bytes: float) -> PlanRequest:
    """Return a request for ranks with so much memory."""
    device = replace(asked.cluster.device, memory_bytes=int(memory_bytes))
    return replace(asked, cluster=replace(asked.cluster, device=device))


def held_bytes(asked: PlanRequest, strategy: Strategy) -> float:
    """Return what the fullest rank of the compiled plan holds exactly."""
    return Compilation(request=asked, limit_bytes=1).compiled(strategy, exact=True).memory_bytes


def of_one(name: str) -> sbp_planner.propagate.PropagatePlanner:
    """Return the planner that tries one set of pins alone."""
    return PropagatePlanner(
        PropagateConfig(pin_sets={name: settings_of("propagate")["pin_sets"][name]})
    )


SHARDED = "data parallel with sharded states"


@pytest.mark.slow
def test_what_fits_is_taken_where_the_fastest_does_not() -> None:
    asked = request((4,), ("data",))
    # Gathers of shards are many messages.
    slow = replace(asked.cluster, intra_node=Link(latency_s=1e-2, bytes_per_s=1e7))
    asked = replace(asked, cluster=slow)
    fastest = default().plan(asked)
    sharded = held_bytes(asked, of_one(SHARDED).plan(asked))
    assert sharded < held_bytes(asked, fastest)

    found = default().plan(within(asked, sharded))

    assert held_bytes(asked, found) <= sharded
    told = found.report["explanation"][0]
    assert f"propagate: {SHARDED}, the fastest of what was tried and fits" in told
    assert "needs" in told
    assert fastest.report["explanation"][0].startswith("propagate: fastest of what was tried: ")


@pytest.mark.slow
def test_where_nothing_fits_what_needs_least_is_returned_and_says_who_looks_further() -> None:
    asked = request((4,), ("data",))
    least = min(
        held_bytes(asked, of_one(name).plan(asked)) for name in settings_of("propagate")["pin_sets"]
    )

    found = default().plan(within(asked, 0.5 * least))

    assert held_bytes(asked, found) == least
    told = found.report["explanation"]
    assert told[0].startswith("propagate: nothing that was tried fits")
    assert "planner=ilp" in told[1]


def test_nothing_to_try_is_refused() -> None:
    with pytest.raises(ConfigError, match="pin_sets"):
        PropagateConfig(pin_sets={})
