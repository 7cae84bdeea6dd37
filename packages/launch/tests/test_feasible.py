"""Settings with which a step fits its memory, found by planning with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from test_savings import make_run
from trainable import plan_step, registry, run_of

from sbp_core.errors import MemoryLimitError, PlanError
from sbp_core.memory import MemoryReport
from sbp_core.passes import RecomputeOptions
from sbp_core.plugins import merge_settings
from sbp_core.units import parse_bytes
from sbp_launch.apps import feasible
from sbp_launch.apps.feasible import (
    MOST_FOUND,
    MOST_S,
    FeasibilitySearch,
    Setup,
    feasible_lines,
    outside_of_hydra,
    told_what_fits,
    with_overrides,
)
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning.flow import Planned
from sbp_launch.settings.config import PluginChoice, RunConfig
from sbp_launch.trainer.planning_only import PlanningOnly
from sbp_launch.trainer.run_program import make_program

RECOMPUTE = "compile.passes.recompute.memory_bytes"


def run_with(overrides: Sequence[str]) -> RunConfig:
    """Return a run of the wide model, replicated, with a few of the settings that there are."""
    run = replace(make_run({}, 2), planner=PluginChoice(name="even"))
    for text in overrides:
        key, _, value = text.partition("=")
        if key == "planner":
            run = replace(run, planner=PluginChoice(name="sharding"))
        elif key == "trainer.micro_batches":
            run = replace(run, trainer=replace(run.trainer, micro_batches=int(value)))
        elif key == RECOMPUTE:
            how = {"recompute": {"memory_bytes": float(parse_bytes(value) or 0)}}
            passes = {"passes": how, "bucket_bytes": 0}
            run = replace(run, compile=merge_settings(CompileConfig, passes, key="compile"))
            assert isinstance(run.compile.passes.recompute, RecomputeOptions)
        else:
            raise PlanError(f"no plan with {text}")
    return run


@cache
def planned_with(overrides: tuple[str, ...]) -> Planned:
    run = run_of(run_with(overrides))
    return plan_step(run, make_program(run))


def peak_of(*overrides: str) -> int:
    memory = planned_with(overrides).memory
    assert isinstance(memory, MemoryReport)
    return memory.peak


@cache
def search_of(limit_bytes: float, **changed: object) -> FeasibilitySearch:
    fields = {"batch_size": 32, "micro_batches": 1, "sharding": ("planner=manual/zero",)}
    setup = Setup(limit_bytes=limit_bytes, **{**fields, **changed})
    with pytest.MonkeyPatch.context() as patch:
        # No time passes, so that a search finds what it finds however busy the machine is.
        patch.setattr(feasible, "perf_counter", lambda: 0.0)
        found = FeasibilitySearch(setup, lambda more: planned_with(tuple(more)), planned_with(()))
        found.run()
    return found


@pytest.mark.slow
def test_what_is_found_fits_by_its_exact_memory_and_stands_by_number_of_changes() -> None:
    limit = peak_of("planner=manual/zero")

    search = search_of(limit)

    assert ("planner=manual/zero",) in [one.overrides for one in search.found]
    assert 0 < len(search.found) <= MOST_FOUND
    for one in search.attempts:
        assert one.peak_bytes == peak_of(*one.overrides)
        assert one.fits == (one.peak_bytes <= limit)
    changes = [len({text.partition(".")[0] for text in one.overrides}) for one in search.found]
    assert changes == sorted(changes)


def test_states_are_tried_in_the_memory_of_the_host() -> None:
    limit = peak_of("planner=manual/zero")

    # What stands for offloading here needs less of the device.
    search = search_of(limit, sharding=(), micro_batches=0, offloading=("planner=manual/zero",))

    assert [one.overrides for one in search.found] == [("planner=manual/zero",)]


def test_a_budget_of_recomputation_is_what_is_left_for_activations() -> None:
    sharded = peak_of("planner=manual/zero")

    search = search_of(0.9 * sharded, micro_batches=0)

    first, second = search.attempts
    assert (first.overrides, first.fits) == (("planner=manual/zero",), False)
    assert second.overrides[0] == first.overrides[0]
    assert second.overrides[1].startswith(f"{RECOMPUTE}=")
    assert second.peak_bytes < sharded


def test_micro_batches_are_the_next_that_divide_the_batch() -> None:
    search = search_of(1.0, sharding=(), batch_size=12, micro_batches=2)

    counts = [one.overrides[0] for one in search.attempts if len(one.overrides) == 1]
    assert counts == [f"trainer.micro_batches={count}" for count in (4, 6, 12)]


def test_what_leads_to_no_plan_is_passed_over() -> None:
    search = search_of(1.0, sharding=("unknown=1",), micro_batches=0)

    assert [(one.overrides, one.peak_bytes) for one in search.attempts] == [(("unknown=1",), 0)]
    assert list(feasible_lines(search)) == []


@pytest.mark.slow
def test_what_fits_is_told_with_its_cost_and_else_what_is_nearest() -> None:
    fitting = list(feasible_lines(search_of(peak_of("planner=manual/zero"))))
    nothing = list(feasible_lines(search_of(1.0)))

    assert fitting[0] == "these settings fit, the smallest change first:"
    assert any("planner=manual/zero: " in line and "a step" in line for line in fitting)
    assert len(nothing) == 1 and "that were tried fits; the nearest: " in nothing[0]


def test_a_single_attempt_is_not_called_several() -> None:
    search = search_of(1.0)
    del search.attempts[1:]

    assert [line.partition("(")[0] for line in feasible_lines(search)] == [
        f"not enough: {search.attempts[0].overrides[0]} "
    ]


def test_of_a_step_whose_plans_take_long_nothing_is_tried_and_planners_are_named() -> None:
    limit = peak_of("planner=manual/zero")
    searching = ("planner=ilp", "planner=auto")

    search = search_of(limit, attempt_s=MOST_S + 1, searching=searching)

    assert search.attempts == [] and search.is_cut_short
    assert list(feasible_lines(search)) == [
        "other settings were not tried, because each takes long to try; planner=ilp and "
        "planner=auto look for a plan that fits, and with trainer.micro_batches=auto for a number "
        "of micro-batches"
    ]


def test_how_long_a_plan_takes_is_learned_from_the_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(feasible, "perf_counter", lambda: clock[0])

    def plan(more: Sequence[str]) -> Planned:
        clock[0] += 0.6 * MOST_S
        raise PlanError("no plan")

    setup = Setup(limit_bytes=1.0, batch_size=32, micro_batches=1, sharding=("unknown=1",))
    search = FeasibilitySearch(setup, plan, None)
    search.run()

    assert len(search.attempts) == 1 and search.is_cut_short


@pytest.mark.slow
def test_the_error_of_a_plan_says_where_it_is_fullest_and_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feasible, "perf_counter", lambda: 0.0)
    limit = peak_of("planner=manual/zero")
    base = run_with(())
    settings = {**base.cluster.settings, "memory_bytes": limit}
    config = replace(base, cluster=replace(base.cluster, settings=settings))

    def recompose(more: Sequence[str]) -> RunConfig:
        return replace(run_with(more), cluster=config.cluster)

    planning = PlanningOnly(config, registry(), run_of(config).console)
    with pytest.raises(MemoryLimitError) as caught:
        planning.plan()
    told = told_what_fits(caught.value, planning, recompose)

    assert any(place.startswith("rank 0 at its peak, in firing ") for place in told.where)
    assert told.todo.startswith("these settings fit")


@given(
    st.lists(
        st.sampled_from(
            ["planner=osdp", "planner.memory_bytes=5", "trainer.micro_batches=2", "model=gpt"]
        ),
        unique=True,
    )
)
def test_new_overrides_replace_those_of_their_keys(said: list[str]) -> None:
    more = ["planner=manual/zero", "trainer.micro_batches=4"]

    found = with_overrides(said, more)

    assert found == [text for text in said if text == "model=gpt"] + more


def test_a_config_is_composed_inside_of_a_job_and_hydra_is_as_before() -> None:
    with initialize_config_module("sbp_launch.conf", version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        with (
            outside_of_hydra(),
            initialize_config_module("sbp_launch.conf", version_base="1.3"),
        ):
            assert GlobalHydra.instance().hydra is not outer
            assert compose("logger/none")

        assert GlobalHydra.instance().hydra is outer


def test_buckets_of_a_size_that_the_planner_chooses_are_tried_first() -> None:
    tried: list[tuple[str, ...]] = []

    def plan(overrides: Sequence[str]) -> Planned:
        tried.append(tuple(overrides))
        raise PlanError("no plan")

    setup = Setup(
        limit_bytes=1.0,
        batch_size=1,
        micro_batches=0,
        sharding=("planner=osdp",),
        buckets=("compile.bucket_bytes=null",),
    )
    FeasibilitySearch(setup, plan, None).run()

    assert tried == [("compile.bucket_bytes=null",), ("planner=osdp",)]
