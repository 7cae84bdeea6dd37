"""The planner `file`: a strategy from a file, written by an earlier run and perhaps edited.

Reads what a run leaves as `strategy.yaml` and `strategy.json`, and decides nothing itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sbp_core import strategy_yaml
from sbp_core.compile import check_strategy
from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph import LogicalGraph, TensorType, graph_hash
from sbp_core.infer import predict_cost, stage_placements
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy
from sbp_planner.configs import FileConfig

#: Most names that a message lists.
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class FilePlanner:
    """Reads its plans."""

    config: FileConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the strategy of the file, with predictions for this cluster.

        Raises:
            ConfigError: the file cannot be read, or its strategy is for another graph or mesh.
            SignatureError: an operator may not be cut as the file says.
            SbpValueError: a tensor may not be stored as the file says.
            PlanError: the strategy is not one for the graph; see `check_strategy`.
        """
        path = Path(self.config.path)
        try:
            read = _read(path, request.graph)
        except SbpError as error:
            raise ConfigError(
                f"the strategy cannot be used: {error.what}",
                where=(f"planner.path={path}", *(p for p in error.where if p != str(path))),
                accepted=error.accepted,
                todo=error.todo,
            ) from error
        self._check(read, request)
        strategy = replace(read, planner="file", graph_hash=graph_hash(request.graph), report={})
        # Nothing can be predicted of a strategy that is not legal.
        check_strategy(request.graph, strategy)
        explanation = [f"as {path} says, made by planner {read.planner}"]
        report = {
            **predict_cost(request.graph, strategy, request.cluster, request.options),
            "explanation": explanation,
        }
        return replace(strategy, report=report)

    def _check(self, read: Strategy, request: PlanRequest) -> None:
        """Check that a strategy is for a graph and a mesh.

        Raises:
            ConfigError: it is not.
        """
        where = f"planner.path={self.config.path}"
        _check_names(read, request.graph, where)
        stages = tuple(stage_placements(request.mesh))
        if read.stages != stages:
            raise ConfigError(
                f"the strategy is for {_meshes(read.stages)}, and the mesh is {_meshes(stages)}",
                where=where,
                todo="set cluster.mesh and cluster.axes as in the run that made the strategy",
            )
        count = request.graph.num_micro_batches
        if read.num_micro_batches != count:
            raise ConfigError(
                f"the strategy is for {read.num_micro_batches} micro-batches, the step has {count}",
                where=where,
                todo=f"set trainer.micro_batches={read.num_micro_batches}",
            )
        if read.graph_hash != graph_hash(request.graph) and not self.config.other_graph:
            raise ConfigError(
                "the strategy was made for another graph of the same names: shapes, operators or "
                "settings of the step differ",
                where=where,
                accepted=f"a strategy with graph_hash: {graph_hash(request.graph)}",
                todo="run what made the strategy, or set planner.other_graph=true",
            )


def _read(path: Path, graph: LogicalGraph) -> Strategy:
    """Read a file.

    Raises:
        SbpError: it cannot be read.
    """
    return Strategy.load(path) if path.suffix == ".json" else strategy_yaml.load(path, graph)


def _check_names(read: Strategy, graph: LogicalGraph, where: str) -> None:
    """Check that a strategy decides on what the graph has, and on nothing else.

    Raises:
        ConfigError: it does not.
    """
    inputs = {e.name for e in graph.inputs if isinstance(graph.types[e.name], TensorType)}
    nodes = {node.name for node in graph.nodes if not node.is_host}
    for section, found, wanted in (
        ("storage", read.storage.keys(), inputs),
        ("nodes", read.nodes.keys(), nodes),
    ):
        for text, names in (
            ("does not decide on", wanted - found),
            ("names what the step does not have:", found - wanted),
        ):
            if names:
                listed = ", ".join(sorted(names)[:_MOST_NAMES]) + ", ..." * (
                    len(names) > _MOST_NAMES
                )
                raise ConfigError(
                    f"{section} of the strategy {text} {listed}",
                    where=where,
                    accepted="a decision for each input and operator of this very step",
                    todo="plan again for this model, or correct the file",
                )


def _meshes(stages: tuple[object, ...]) -> str:
    return "; ".join(map(str, stages))


def build(config: FileConfig) -> FilePlanner:
    """Make the planner."""
    return FilePlanner(config)
