"""The price of a loss: its sum, and what that is divided by, are reduced in one call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.compile import COMMIT, CompileOptions, compile_plan
from sbp_core.infer import infer_strategy, joint_problem
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_planner.ilp import IlpPlanner
from sbp_planner.search_configs import IlpConfig
from sbp_torch.testing.programs import capture_tiny, small_cluster

DATA_PARALLEL = {
    "batch": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "updates": "B",
    "activations": "S(0)",
}


def asked(latency_s: float) -> PlanRequest:
    """Return a step whose calls cost their latency, nearly alone."""
    machine = small_cluster(4)
    link = replace(machine.intra_node, latency_s=latency_s)
    machine = replace(machine, intra_node=link)
    options = CompileOptions(cluster=machine)
    return PlanRequest(
        graph=capture_tiny(micro_batch_size=8).graph,
        mesh=Placement.grid((4,), ("data",)),
        cluster=machine,
        options=options,
    )


def data_parallel_s(request: PlanRequest) -> float:
    """Return what a step takes, but for the call in which ranks commit to it."""
    strategy = infer_strategy(request, planner="test", pins=DATA_PARALLEL)
    plan = compile_plan(request.graph, strategy, request.options)
    return simulate(plan).step_s - plan.by_rank[0].by_name[COMMIT].time_s


@pytest.mark.slow
def test_data_parallelism_costs_what_its_plan_takes() -> None:
    request = asked(latency_s=1e-3)
    problem = joint_problem(request, pins=DATA_PARALLEL)

    assert problem.cost(problem.start) == pytest.approx(data_parallel_s(request), rel=1e-3)


@pytest.mark.parametrize("latency_s", [1e-4, 1e-2])
def test_what_ilp_proves_is_no_more_than_data_parallelism_takes(latency_s: float) -> None:
    request = asked(latency_s)

    report = IlpPlanner(IlpConfig()).plan(request).report

    assert report["bound_s"] <= data_parallel_s(request)
