"""Which tensors of a step could travel together, and what a step costs then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.boxing import StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.graph.ir import LogicalGraph
from sbp_core.infer import StepCompanions, infer_strategy, joint_problem
from sbp_core.infer.stages import assign_stages
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.testing.graphs import cluster, mlp

_MESH = Placement.grid((2,), ("data",))
_DEVICE = replace(cluster().device, launch_s=2e-6, boxing_launch_s=1e-4)
_MACHINE = replace(cluster(latency_s=3e-4), device=_DEVICE)


def _companions(graph: LogicalGraph) -> StepCompanions:
    return StepCompanions(graph, assign_stages(graph, 1, ()), {})


def _serial_s(
    graph: LogicalGraph, machine: Cluster, pins: dict[str, str], options: CompileOptions
) -> tuple[float, float]:
    """Return the cost of the one assignment that pins leave, and the time of its plan."""
    request = PlanRequest(graph=graph, mesh=_MESH, cluster=machine, options=options)
    strategy = infer_strategy(request, planner="test", pins=pins)
    problem = joint_problem(request, pins=pins)
    commit_s = 3e-4 + 1e-4 + 2e-6  # latency and launches, which no assignment changes
    return problem.cost(problem.start), simulate(
        compile_plan(graph, strategy, options)
    ).step_s - commit_s


def test_gradients_travel_together_and_new_values_and_the_parameters_of_a_block() -> None:
    found = _companions(mlp((4, 8, 4, 4)))

    gradients = found.of("layers.0.grad.mm")
    assert gradients is not None
    assert gradients.kinds == {StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER}
    assert gradients.sizes == (64, 128, 128)
    assert found.of("layers.2.grad.mm") is gradients
    new_values = found.of("layers.1.weight.update.addcdiv")
    assert new_values is not None
    assert new_values.kinds == {StepKind.ALL_GATHER}
    # Of three layers: parameters, and two states each.
    assert new_values.sizes == tuple(sorted(3 * [64, 128, 128]))
    gathered = found.of("layers.1.weight", "forward")
    assert gathered is not None
    assert gathered.sizes == (128,)


def test_activations_and_what_is_not_in_the_step_travel_alone() -> None:
    found = _companions(mlp((4, 8, 4)))

    assert found.of("layers.0.mm") is None
    assert found.of("layers.1.grad.mm_1") is None
    assert found.of("layers.0.weight", "optimizer") is None
    assert found.of("nothing of the sort") is None


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_gradients_that_travel_together_cost_about_what_their_plan_takes(
    num_micro_batches: int,
) -> None:
    graph = mlp([64] * 25, batch=64, num_micro_batches=num_micro_batches)
    pins = {"batch": "S(0)", "parameters": "B", "optimizer_states": "B", "activations": "S(0)"}

    shared = _serial_s(graph, _MACHINE, pins, CompileOptions(cluster=_MACHINE))
    alone = _serial_s(graph, _MACHINE, pins, CompileOptions(cluster=_MACHINE, bucket_bytes=0))

    assert shared[0] == pytest.approx(shared[1], rel=0.1)
    assert alone[0] == pytest.approx(alone[1], rel=0.01)
    assert shared[0] < 0.5 * alone[0]


def test_sharded_states_cost_about_what_their_plan_takes() -> None:
    graph = mlp([64] * 25, batch=64)
    pins = {"batch": "S(0)", "parameters": "B", "optimizer_states": "S(0)", "activations": "S(0)"}
    pins |= {"gradients": "S(0)", "updates": "S(0)"}

    shared = _serial_s(graph, _MACHINE, pins, CompileOptions(cluster=_MACHINE))

    assert shared[0] == pytest.approx(shared[1], rel=0.1)
