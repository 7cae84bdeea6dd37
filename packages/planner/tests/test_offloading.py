"""States in the memory of the host: by a setting, and as many as it takes to fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_requests import request

from sbp_core.cluster import Link
from sbp_core.compile import CompileOptions, compile_plan, offloadable, owner_of
from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import infer_strategy
from sbp_core.memory import predict_memory
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.planning.compiled import Compilation
from sbp_core.planning.host_states import offloading, with_states
from sbp_core.planning.offload_fit import until_it_fits
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_planner import auto, manual, propagate
from sbp_planner.configs import ManualConfig, PropagateConfig
from sbp_planner.search_configs import AutoConfig

_LINK = Link(latency_s=1e-6, bytes_per_s=1e7)


def _request(host_bytes: int | None = 1 << 30, num_ranks: int = 1) -> PlanRequest:
    """Return the request for the step of a GPT on devices with a host."""
    made = request((num_ranks,), ("data",))
    link = None if host_bytes is None else _LINK
    device = replace(made.cluster.device, host_memory_bytes=host_bytes, host_link=link)
    return replace(made, cluster=replace(made.cluster, device=device))


def _offloaded(strategy: Strategy) -> set[str]:
    return {name for name, one in strategy.storage.items() if one.offloaded}


@pytest.fixture(scope="module")
def inferred() -> Strategy:
    return infer_strategy(_request(), planner="test", pins={"batch": "S(0)"})


def test_patterns_name_the_states_that_are_offloaded(inferred: Strategy) -> None:
    asked = _request()
    moments = {e.name for e in asked.graph.inputs if e.kind.value == "optimizer_state"}

    first = offloading(asked, inferred, ["*.exp_avg"])
    all_of_them = offloading(asked, inferred, ["optimizer_states"])

    assert _offloaded(first) == {name for name in moments if name.endswith(".exp_avg")}
    assert (
        _offloaded(all_of_them)
        == {name for name in moments if asked.graph.is_tensor(name)}
        == set(offloadable(asked.graph))
    )
    assert all_of_them.report["offload"]["bytes_per_rank"] == sum(
        asked.graph.tensor(name).size_bytes for name in _offloaded(all_of_them)
    )
    assert "are in the memory of its host" in all_of_them.report["explanation"][-1]
    assert offloading(asked, inferred, []) == inferred


def test_a_pattern_that_names_no_state_is_refused(inferred: Strategy) -> None:
    with pytest.raises(ConfigError, match=r"'\*\.momentum' names no state that can be offloaded"):
        offloading(_request(), inferred, ["*.momentum"])


def test_devices_without_a_host_offload_nothing(inferred: Strategy) -> None:
    with pytest.raises(ConfigError, match="have no host memory"):
        offloading(_request(None), inferred, ["optimizer_states"])


@pytest.mark.parametrize("planner", ["manual", "propagate"])
def test_presets_offload_what_they_are_told_to(planner: str) -> None:
    asked = _request()
    pins = {"batch": "S(0)"}
    made = (
        manual.ManualPlanner(ManualConfig(pins=pins, offload=("optimizer_states",)))
        if planner == "manual"
        else propagate.PropagatePlanner(
            PropagateConfig(pin_sets={"batch": pins}, offload=("optimizer_states",))
        )
    )

    strategy = made.plan(asked)

    assert _offloaded(strategy) == set(offloadable(asked.graph))


def test_a_parameter_cannot_be_offloaded(inferred: Strategy) -> None:
    asked = _request()
    name = next(e.name for e in asked.graph.inputs if e.kind.value == "parameter")

    with pytest.raises(PlanError, match="cannot be offloaded: it is needed in the forward phase"):
        compile_plan(asked.graph, offloading(asked, inferred, [name]))


@pytest.mark.slow
def test_as_few_of_the_largest_states_are_offloaded_as_fit(inferred: Strategy) -> None:
    asked = _request()
    options = CompileOptions(cluster=asked.cluster)
    usual = predict_memory(compile_plan(asked.graph, inferred, options)).peak
    everything = compile_plan(
        asked.graph, offloading(asked, inferred, ["optimizer_states"]), options
    )
    least = predict_memory(everything).peak
    assert least < usual
    limit = (usual + least) // 2

    found = until_it_fits(Compilation(request=asked, limit_bytes=limit), inferred)

    assert found is not None and found.fits
    chosen = _offloaded(found.strategy)
    assert 0 < len(chosen) < len(offloadable(asked.graph))
    kept = {name for name in offloadable(asked.graph) if name not in chosen}
    sizes = {name: asked.graph.tensor(name).size_bytes for name in (*chosen, *kept)}
    # But for the last parameter, of which a smaller one may be enough, the largest.
    last = owner_of(min(chosen, key=sizes.__getitem__))
    largest = [name for name in chosen if owner_of(name) != last]
    assert min(sizes[name] for name in largest) >= max(sizes[name] for name in kept)
    fewer = with_states(asked, found.strategy, largest)
    assert predict_memory(compile_plan(asked.graph, fewer, options)).peak > limit
    plan = compile_plan(asked.graph, found.strategy, options)
    assert predict_memory(plan).peak == found.memory_bytes <= limit
    assert found.host_bytes == sum(sizes[name] for name in chosen)
    assert found.step_s == simulate(plan).step_s
    assert until_it_fits(Compilation(request=asked, limit_bytes=least // 2), inferred) is None
    just_enough = _request(host_bytes=int(found.host_bytes))
    again = until_it_fits(Compilation(request=just_enough, limit_bytes=limit), inferred)
    assert again is not None and _offloaded(again.strategy) == chosen


@pytest.mark.slow
def test_what_does_not_fit_the_host_does_not_fit(inferred: Strategy) -> None:
    small = _request(host_bytes=1000)
    everything = Compilation(request=_request(), limit_bytes=1).compiled(inferred, exact=True)
    limit = 0.9 * everything.memory_bytes

    assert until_it_fits(Compilation(request=_request(), limit_bytes=limit), inferred) is not None
    assert until_it_fits(Compilation(request=small, limit_bytes=limit), inferred) is None


@pytest.mark.slow
def test_auto_offloads_what_does_not_fit_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = _request()
    # The searches take long, and there is nothing to search on one rank.
    monkeypatch.setattr("sbp_planner.auto._Search._searches", lambda *_: iter(()))
    monkeypatch.setattr("sbp_planner.auto._NUM_OFFLOADED", 1)
    fits_easily = auto.AutoPlanner(AutoConfig()).plan(asked)
    options = CompileOptions(cluster=asked.cluster)
    everything = offloading(asked, fits_easily, ["optimizer_states"])
    limit = predict_memory(compile_plan(asked.graph, everything, options)).peak
    config = AutoConfig(memory_bytes=limit)

    strategy = auto.AutoPlanner(config).plan(asked)

    assert not _offloaded(fits_easily)
    assert _offloaded(strategy)
    plan = compile_plan(asked.graph, strategy, options)
    assert predict_memory(plan).peak <= limit
    assert "with offload is the fastest" in strategy.report["explanation"][0]
    with pytest.raises(PlanError, match="nothing that was tried fits"):
        auto.AutoPlanner(config).plan(_request(None))


@pytest.mark.slow
def test_each_stage_offloads_what_its_own_ranks_need() -> None:
    asked = replace(_request(), mesh=Placement.grid((2,), ("pipe",)))
    strategy = infer_strategy(asked, planner="test", pins={"batch": "S(0)"})
    compilation = Compilation(request=asked, limit_bytes=1)
    held = compilation.by_rank(compilation.plan(strategy))
    fuller = max(held, key=lambda rank: held[rank])
    limit = held[fuller] - 1
    assert min(held.values()) <= limit, "the stages need different amounts"

    found = until_it_fits(Compilation(request=asked, limit_bytes=limit), strategy)

    assert found is not None and found.fits and _offloaded(found.strategy)
    for name in _offloaded(found.strategy):
        assert strategy.stages[strategy.storage[name].stage].rank_list == (fuller,)
