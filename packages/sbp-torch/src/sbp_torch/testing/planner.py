"""The conformance suite of planners, which also runs each plan: subclass it and supply one method.

    class TestMyPlanner(PlannerRunConformance):
        meshes = (((4,), ("data",)), ((2, 2), ("data", "tensor")))

        def make_planner(self):
            return build(MyConfig())

In addition to the tests of `sbp_core.testing.planner`, every strategy is run by the reference
runtime, and has to give the losses and shards of one device. A planner that accepts only some
programs overrides `make_step`.
"""

from __future__ import annotations

from functools import cache

from torch import Tensor

from sbp_core.cluster import Cluster
from sbp_core.compile import compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import Number
from sbp_core.testing.planner import PlannerConformance
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import check_shards, run_steps, shards_of
from sbp_torch.testing.programs import (
    OneDeviceStep,
    assert_near,
    capture_tiny,
    one_device_run,
    small_cluster,
)

__all__ = ["PlannerRunConformance"]


class PlannerRunConformance(PlannerConformance):
    """Tests of a planner, with runs of its strategies. The module's docstring has an example."""

    #: Largest deviation from one device; relative for values above 1.
    tolerance: float = 1e-9

    def make_step(self, num_micro_batches: int) -> OneDeviceStep:
        """Return the training step to plan and run; equal on every call."""
        return capture_tiny(num_micro_batches)

    def make_graph(self, num_micro_batches: int) -> LogicalGraph:
        """Return the graph of the step."""
        return self.make_step(num_micro_batches).graph

    def make_cluster(self, num_devices: int) -> Cluster:
        """Return the machine to plan for."""
        return small_cluster(num_devices)

    def test_every_strategy_runs_as_one_device_does(self) -> None:
        """Losses and shards are those of one device; another test checks the plan itself."""
        for what, graph, strategy in self.plans():
            step = self.make_step(graph.num_micro_batches)
            plan = compile_plan(graph, strategy)
            runtime = ReferenceRuntime(ReferenceConfig())
            with runtime.start(plan, step.states, LocalBackend()) as session:
                losses = run_steps(session, step)
                shards = shards_of(session, plan)
            wanted, states = _one_device_run(type(self), graph.num_micro_batches)
            for index, loss in enumerate(losses):
                assert_near(f"{what}: loss {index}", loss, wanted[index], self.tolerance)
            check_shards(plan, shards, states, self.tolerance)


@cache
def _one_device_run(
    suite: type[PlannerRunConformance], count: int
) -> tuple[list[Tensor], dict[str, Tensor | Number]]:
    return one_device_run(suite().make_step(count))
