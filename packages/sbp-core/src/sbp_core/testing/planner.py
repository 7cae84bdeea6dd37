"""The conformance suite of planners: subclass `PlannerConformance` and supply one method.

    class TestMyPlanner(PlannerConformance):
        meshes = (((4,), ("data",)), ((2, 2), ("data", "tensor")))

        def make_planner(self):
            return build(MyConfig())

Every strategy must cover the graph, be legal op by op, be reproducible, survive its file format,
compile and pass the check. This needs rules of the graph's operators, but no tensor library;
`sbp_torch.testing.planner.PlannerRunConformance` also runs the plans. A planner for some programs
only overrides `make_graph`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache

from sbp_core.cluster import Cluster
from sbp_core.compile import compile_plan
from sbp_core.graph import InputKind, LogicalGraph, graph_hash
from sbp_core.infer import PinValue
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.plan_request import Planner, PlanRequest
from sbp_core.sbp import B, check_sbp
from sbp_core.signatures import OpCall, check_signature
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import cluster, mlp

__all__ = ["PlannerConformance"]

#: Mesh shape and axes.
Mesh = tuple[tuple[int, ...], tuple[str, ...]]


class PlannerConformance(ABC):
    """Tests that every planner must pass. See the module's docstring for how to use it."""

    #: Meshes of ranks 0, 1, 2, ... to plan for.
    meshes: tuple[Mesh, ...] = (((1,), ("data",)), ((2,), ("data",)), ((2, 2), ("data", "tensor")))

    #: Micro-batches of one step to plan for.
    micro_batches: tuple[int, ...] = (1, 2)

    @abstractmethod
    def make_planner(self) -> Planner:
        """Return the planner; called for every plan."""

    def make_graph(self, num_micro_batches: int) -> LogicalGraph:
        """Return the training step to plan; equal on every call."""
        return mlp(num_micro_batches=num_micro_batches)

    def make_cluster(self, num_devices: int) -> Cluster:
        """Return the machine to plan for."""
        return cluster(num_devices=num_devices)

    def plan(
        self, mesh: Mesh, num_micro_batches: int, pins: Mapping[str, PinValue] | None = None
    ) -> Strategy:
        """Make one plan."""
        placement = Placement.grid(*mesh)
        request = PlanRequest(
            graph=self.make_graph(num_micro_batches),
            mesh=placement,
            cluster=self.make_cluster(placement.size),
            pins=pins or {},
            progress=_check_progress,
        )
        planner: object = self.make_planner()
        plan = getattr(planner, "plan", None)
        assert callable(plan), f"make_planner returned {planner!r}, which has no method plan"
        strategy = plan(request)
        assert isinstance(strategy, Strategy), f"plan returned {strategy!r}, not a Strategy"
        return strategy

    def plans(self) -> Iterator[tuple[str, LogicalGraph, Strategy]]:
        """Yield a description, the graph and its strategy, for all meshes."""
        for mesh in self.meshes:
            for count in self.micro_batches:
                what = f"mesh {mesh[0]} {mesh[1]}, {count} micro-batches"
                yield what, self.make_graph(count), _planned(type(self), mesh, count)

    def test_every_op_and_state_has_a_legal_assignment(self) -> None:
        """Exactly all nodes and tensor inputs are assigned, on the ranks of the mesh."""
        for mesh in self.meshes:
            for count in self.micro_batches:
                strategy = _planned(type(self), mesh, count)
                check_legal(self.make_graph(count), strategy)
                assert set(strategy.ranks) <= set(Placement.grid(*mesh).rank_list)

    def test_planning_again_gives_the_same_strategy(self) -> None:
        """A new planner gets the same request."""
        for mesh in self.meshes:
            count = self.micro_batches[-1]
            again = self.plan(mesh, count)
            assert again == _planned(type(self), mesh, count), f"another strategy for {mesh}"

    def test_strategies_survive_their_file_format(self) -> None:
        """A strategy is equal after a round trip through JSON, report included."""
        for what, _, strategy in self.plans():
            text = json.dumps(strategy.to_json(), allow_nan=False)
            again = Strategy.from_json(json.loads(text))
            assert again.to_json() == strategy.to_json(), f"{what}: JSON changes the strategy"
            assert (again.nodes, again.storage) == (strategy.nodes, strategy.storage), what

    def test_every_strategy_compiles_and_passes_the_check(self) -> None:
        """The plan cannot deadlock, and its shards have the required shapes."""
        for _, graph, strategy in self.plans():
            check(compile_plan(graph, strategy))

    def test_a_constraint_of_the_user_is_kept(self) -> None:
        """The batch inputs are stored whole, as the user pinned them."""
        mesh, count = self.meshes[-1], self.micro_batches[0]
        strategy = self.plan(mesh, count, {"batch": "B"})
        graph = self.make_graph(count)
        check_legal(graph, strategy)
        for entry in graph.inputs:
            if entry.kind is InputKind.BATCH:
                found = strategy.storage[entry.name].sbp
                assert all(part == B for part in found), f"{entry.name} is stored as {found}"


@cache
def _planned(suite: type[PlannerConformance], mesh: Mesh, num_micro_batches: int) -> Strategy:
    """Plan once for all tests of a suite."""
    return suite().plan(mesh, num_micro_batches)


def _check_progress(what: str, fraction: float) -> None:
    assert what, "progress on nothing"
    assert 0.0 <= fraction <= 1.0, f"{what}: fraction {fraction}"


def check_legal(graph: LogicalGraph, strategy: Strategy) -> None:
    """Check that a strategy covers exactly a graph and is legal op by op.

    Raises:
        AssertionError: a decision is missing, or superfluous.
        SignatureError: an op is split as no signature allows.
    """
    assert strategy.graph_hash == graph_hash(graph), "planned for another graph"
    assert strategy.num_micro_batches == graph.num_micro_batches
    ops = {node.name for node in graph.nodes if not node.is_host}
    assert set(strategy.nodes) == ops, f"nodes: {set(strategy.nodes) ^ ops}"
    inputs = {entry.name for entry in graph.inputs if graph.is_tensor(entry.name)}
    assert set(strategy.storage) == inputs, f"inputs: {set(strategy.storage) ^ inputs}"
    for node in graph.nodes:
        if not node.is_host:
            assigned = strategy.nodes[node.name]
            call = OpCall.of(graph, node)
            check_signature(call, assigned.signature, strategy.stages[assigned.stage])
    for name, storage in strategy.storage.items():
        mesh_shape = strategy.stages[storage.stage].mesh_shape
        check_sbp(graph.tensor(name).shape, storage.sbp, mesh_shape)
