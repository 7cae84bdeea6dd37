"""States in host memory by any planner: as they are named, or where that pays or nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_requests import assert_legal
from step_family import MlpFamily, family_request

from sbp_core.cluster import Link
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan, offloadable
from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph_variant import GraphVariant
from sbp_core.infer import infer_strategy
from sbp_core.memory import check_memory, predict_memory
from sbp_core.placement import Placement
from sbp_core.planning import Planner, PlanRequest
from sbp_core.planning.host_states import offloaded_states, with_states
from sbp_core.planning.search import PlanContext, SearchedPlanner
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import cluster, mlp
from sbp_planner import (
    alpa,
    auto,
    exhaustive,
    galvatron,
    greedy,
    ilp,
    manual,
    mcmc,
    optcnn,
    osdp,
    pipelines,
    placers,
    propagate,
    search_configs,
    tofu,
)
from sbp_planner.configs import ManualConfig, OsdpConfig, PropagateConfig
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import run_steps, shards_of

_FAMILY = MlpFamily(sizes=(8, 32, 1, 8), batch_size=16, may_recompute=False, may_slice=False)

#: With settings that keep them short; `exhaustive` has too much to look at here.
_PLANNERS: dict[str, Callable[..., Planner]] = {
    "alpa": lambda **s: alpa.AlpaPlanner(search_configs.AlpaConfig(**s)),
    "auto": lambda **s: auto.AutoPlanner(search_configs.AutoConfig(time_limit_s=1e-6, **s)),
    "dlplacer": lambda **s: placers.DlplacerPlanner(search_configs.DlplacerConfig(**s)),
    "galvatron": lambda **s: galvatron.GalvatronPlanner(search_configs.GalvatronConfig(**s)),
    "gpipe": lambda **s: pipelines.GpipePlanner(search_configs.GpipeConfig(**s)),
    "greedy": lambda **s: greedy.GreedyPlanner(search_configs.GreedyConfig(**s)),
    "ilp": lambda **s: ilp.IlpPlanner(search_configs.IlpConfig(**s)),
    "propagate": lambda **s: propagate.PropagatePlanner(PropagateConfig(**s)),
    "manual": lambda **s: manual.ManualPlanner(ManualConfig(pins={"batch": "S(0)"}, **s)),
    "mcmc": lambda **s: mcmc.McmcPlanner(search_configs.McmcConfig(proposals=2, **s)),
    "optcnn": lambda **s: optcnn.OptcnnPlanner(search_configs.OptcnnConfig(**s)),
    "osdp": lambda **s: osdp.OsdpPlanner(OsdpConfig(**s)),
    "pipedream": lambda **s: pipelines.PipedreamPlanner(search_configs.PipedreamConfig(**s)),
    "stanza": lambda **s: placers.StanzaPlanner(search_configs.StanzaConfig(**s)),
    "tofu": lambda **s: tofu.TofuPlanner(search_configs.TofuConfig(**s)),
}


def asked(
    *,
    host_bytes: int | None = 1 << 30,
    host_bytes_per_s: float = 1e9,
    bytes_per_s: float = 1e8,
    count: int = 1,
) -> PlanRequest:
    """Return the request to plan the step of an MLP on two ranks of devices with a host."""
    made = family_request(_FAMILY, bytes_per_s=bytes_per_s)
    link = Link(latency_s=1e-6, bytes_per_s=host_bytes_per_s) if host_bytes is not None else None
    device = replace(made.cluster.device, host_memory_bytes=host_bytes, host_link=link)
    graph = _graph(count)
    return replace(made, graph=graph, family=None, cluster=replace(made.cluster, device=device))


@cache
def _graph(count: int) -> Any:
    return _FAMILY.graph(GraphVariant(num_micro_batches=count))


def compiled(request: PlanRequest, strategy: Strategy) -> PhysicalPlan:
    return compile_plan(request.graph, strategy, CompileOptions(cluster=request.cluster))


def peak(request: PlanRequest, strategy: Strategy) -> int:
    return predict_memory(compiled(request, strategy)).peak


@cache
def limits(planner: str) -> tuple[float, float]:
    """Return what a planner's plan needs without a limit, and one that it finds nothing within."""
    request = asked(host_bytes=None)
    usual = limit = float(peak(request, _PLANNERS[planner]().plan(request)))
    while True:
        try:
            _PLANNERS[planner](memory_bytes=limit).plan(request)
        except SbpError:
            return usual, limit
        limit *= 0.9


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("planner", _PLANNERS)
def test_every_planner_takes_states_for_host_memory_by_name(planner: str) -> None:
    request = asked(count=2)

    strategy = _PLANNERS[planner](offload=("optimizer_states",)).plan(request)

    assert offloaded_states(strategy) == set(offloadable(request.graph))
    assert any(line.startswith("offloaded: ") for line in strategy.report["explanation"])
    assert_legal(request.graph, strategy)
    check_memory(predict_memory(compiled(request, strategy)), 1 << 40, 1 << 30)


@pytest.mark.parametrize("planner", _PLANNERS)
def test_every_planner_refuses_names_where_there_is_no_host(planner: str) -> None:
    made = _PLANNERS[planner](offload=("*.exp_avg",))
    cluster = SimpleNamespace(mesh=(2,), axes=("data",), host_memory_bytes=None)

    with pytest.raises(ConfigError, match="have no host memory"):
        made.config.check_combination({"cluster": cluster})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="have no host memory"):
        made.plan(asked(host_bytes=None))


def test_a_setting_that_is_no_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="offload='optimizer_states'"):
        OsdpConfig(offload="optimizer_states")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["osdp", "ilp"])
def test_what_fits_only_with_states_in_host_memory_is_found_and_trains_alike(
    planner: str,
) -> None:
    _, limit = limits(planner)
    request = asked()
    strategy = _PLANNERS[planner](memory_bytes=limit).plan(request)

    assert offloaded_states(strategy)
    assert "nothing that was found fits without" in strategy.report["explanation"][-1]
    assert_legal(request.graph, strategy)
    plan = compiled(request, strategy)
    check_memory(predict_memory(plan), limit, 1 << 30)
    there = results(plan)
    here = results(compiled(request, with_states(request, strategy, ())))
    assert all(torch.equal(*pair) for pair in zip(there[0], here[0], strict=True))
    assert there[1].keys() == here[1].keys()
    assert all(equal(there[1][key], here[1][key]) for key in here[1])
    with pytest.raises(SbpError, match="fits"):
        _PLANNERS[planner](memory_bytes=limit, offload=()).plan(request)


def results(plan: PhysicalPlan) -> tuple[list[Any], dict[Any, Any]]:
    """Return the losses of two steps, and what is stored then."""
    step = _FAMILY.step(_FAMILY.variant)
    with ReferenceRuntime(ReferenceConfig()).start(plan, step.states, LocalBackend()) as session:
        return run_steps(session, step), shards_of(session, plan)


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("planner", ["osdp", "ilp", "galvatron", "gpipe"])
def test_with_enough_memory_nothing_is_offloaded(planner: str) -> None:
    request = asked()

    strategy = _PLANNERS[planner]().plan(request)

    assert not offloaded_states(strategy)
    assert not any("host memory" in line for line in strategy.report["explanation"])


@pytest.mark.slow
def test_states_are_offloaded_where_that_is_faster_than_what_fits_without() -> None:
    # Slow links between ranks, so that sharded parameters are dear.
    request = asked(bytes_per_s=1e6)
    limit = 0.95 * peak(request, _PLANNERS["osdp"](offload=()).plan(request))
    made = _PLANNERS["osdp"](memory_bytes=limit)
    plain = _PLANNERS["osdp"](memory_bytes=limit, offload=()).plan(request)

    fast = made.plan(request)
    slow = made.plan(asked(bytes_per_s=1e6, host_bytes_per_s=1e4))

    assert offloaded_states(fast)
    assert peak(request, fast) <= limit
    steps = [simulate(compiled(request, one)).step_s for one in (fast, plain)]
    assert steps[0] < steps[1]
    assert "a step is the fastest that fits" in fast.report["explanation"][-1]
    assert not offloaded_states(slow)
    assert slow.report["explanation"][-1].startswith("host memory: ")


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["osdp", pytest.param("ilp", marks=pytest.mark.exhaustive)])
def test_a_host_that_is_too_small_is_told_with_what_would_do(planner: str) -> None:
    _, limit = limits(planner)
    with pytest.raises(SbpError, match="fits") as refused:
        _PLANNERS[planner](memory_bytes=limit).plan(asked(host_bytes=16))

    enough = refused.value.todo.partition("host_memory_bytes >= ")[2].partition(",")[0]
    strategy = _PLANNERS[planner](memory_bytes=limit).plan(asked(host_bytes=int(enough)))

    assert predict_memory(compiled(asked(), strategy)).host_peak <= int(enough)


@pytest.mark.slow
def test_a_limit_that_host_memory_does_not_help_is_told() -> None:
    with pytest.raises(SbpError, match="no choice fits") as refused:
        _PLANNERS["osdp"](memory_bytes=1000.0).plan(asked())

    told = "states of the optimizer in the memory of the host are not enough"
    assert refused.value.todo.startswith(told)


def test_a_wrong_pin_is_told_as_it_is() -> None:
    made = osdp.OsdpPlanner(OsdpConfig(pins={"nothing.like.it": "B"}))

    with pytest.raises(SbpError) as without:
        made.plan(asked(host_bytes=None))
    with pytest.raises(SbpError) as beside:
        made.plan(asked())

    assert str(beside.value) == str(without.value)


@pytest.mark.slow
def test_a_planner_without_a_limit_offloads_what_does_not_fit() -> None:
    request = asked()
    usual = peak(request, _PLANNERS["optcnn"]().plan(request))
    device = replace(request.cluster.device, memory_bytes=usual - 1)
    short = replace(request, cluster=replace(request.cluster, device=device))

    strategy = _PLANNERS["optcnn"]().plan(short)

    assert offloaded_states(strategy)
    assert peak(request, strategy) < usual
    assert not offloaded_states(_PLANNERS["optcnn"](offload=()).plan(short))


@dataclass(frozen=True)
class Noting(SearchedPlanner):
    """Notes what it is asked; `saved` is what any memory would save of a step."""

    saved: float
    calls: list[PlanRequest]

    config = SimpleNamespace(memory_bytes=1e9)
    keeps_limit = True

    def propose(self, context: PlanContext) -> Strategy:
        self.calls.append(context.request)
        return infer_strategy(context.request, planner="test", pins={"batch": "S(0)"})

    def gain(self, planned: Strategy) -> float:
        return self.saved


def test_a_planner_is_asked_once_if_memory_is_not_short() -> None:
    request, calls = asked(), list[PlanRequest]()

    Noting(0.009, calls).plan(request)
    assert len(calls) == 1
    Noting(0.011, calls).plan(request)
    assert len(calls) > 1 and calls[2].offloaded == set(offloadable(request.graph))


@pytest.mark.exhaustive
def test_variants_of_the_step_compete_with_host_memory() -> None:
    family = replace(_FAMILY, micro_batches=(1, 2), _graphs={})
    request = replace(asked(bytes_per_s=1e6), family=family, graph=family.graph(family.variant))
    limit = 0.95 * peak(request, _PLANNERS["osdp"](offload=()).plan(request))

    plain = _PLANNERS["osdp"](memory_bytes=limit, offload=()).plan(request)
    strategy = _PLANNERS["osdp"](memory_bytes=limit).plan(request)

    steps = []
    for one in (strategy, plain):
        assert one.variant is not None
        variant = request.of(one.variant)
        assert_legal(variant.graph, one)
        assert peak(variant, one) <= limit
        steps.append(simulate(compiled(variant, one)).step_s)
    assert offloaded_states(strategy)
    assert steps[0] < steps[1]


@pytest.mark.exhaustive
def test_what_memory_costs_by_a_program_is_what_the_fastest_of_any_memory_takes_less() -> None:
    request = asked(bytes_per_s=1e7)
    best = _PLANNERS["ilp"](offload=()).plan(request)
    limit = 0.95 * peak(request, best)

    short = _PLANNERS["ilp"](memory_bytes=limit, offload=()).plan(request)

    assert ilp.memory_gain(best) == 0
    wanted = 1 - best.report["cost_s"] / short.report["cost_s"]
    assert ilp.memory_gain(short) == pytest.approx(wanted)
    assert wanted > 0


@pytest.mark.parametrize(
    ("unlimited_s", "outcome", "wanted"),
    [
        (1.0, "struck by its bound", 0.0),
        (0.75, "struck by its bound", 0.25),
        (1.0, "no plan fits", 0.5),
        (1.0, "slower", 0.5),
    ],
)
def test_what_memory_costs_is_known_from_variants_that_do_not_fit(
    unlimited_s: float, outcome: str, wanted: float
) -> None:
    variants = [{"variant": "2 micro-batches", "bound_s": 0.5, "outcome": outcome}]
    report = {"cost_s": 1.0, "unlimited_s": unlimited_s, "variants": variants}
    planned = infer_strategy(asked(), planner="test", pins={"batch": "S(0)"}, report=report)

    assert ilp.IlpPlanner(search_configs.IlpConfig()).gain(planned) == pytest.approx(wanted)


@pytest.mark.parametrize("host_bytes_per_s", [1e4, 1e6, 1e10])
def test_a_program_with_states_in_host_memory_costs_what_the_truth_does(
    host_bytes_per_s: float,
) -> None:
    link = Link(latency_s=1e-6, bytes_per_s=host_bytes_per_s)
    machine = cluster()
    device = replace(machine.device, host_memory_bytes=1 << 30, host_link=link)
    request = PlanRequest(
        graph=mlp((4, 4), batch=4),
        mesh=Placement.grid((2,), ("data",)),
        cluster=replace(machine, device=device),
    )
    named = ("optimizer_states",)

    truth = exhaustive.ExhaustivePlanner(search_configs.ExhaustiveConfig(offload=named)).plan(
        request
    )
    found = _PLANNERS["ilp"](offload=named).plan(request)
    without = _PLANNERS["ilp"]().plan(request)

    assert offloaded_states(truth) == offloaded_states(found) == set(offloadable(request.graph))
    assert found.report["cost_s"] == pytest.approx(truth.report["cost_s"], rel=1e-9)
    assert found.report["cost_s"] > without.report["cost_s"]
