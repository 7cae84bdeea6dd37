"""The planner `file`: takes its strategy, the split of each tensor, from a file, perhaps edited.

Reads the `strategy.yaml` or `strategy.json` of a run, and decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sbp_core.compile import check_strategy
from sbp_core.errors import ConfigError, suggestion
from sbp_core.graph import LogicalGraph, TensorType, graph_hash
from sbp_core.graph_variant import GraphVariant
from sbp_core.infer import predict_cost
from sbp_core.planning import (
    PlanContext,
    PlanRequest,
    SearchedPlanner,
    offloaded_states,
    with_states,
)
from sbp_core.serialize import Lines
from sbp_core.strategy import Strategy
from sbp_planner.configs import FileConfig
from sbp_planner.strategy_file import check_mesh, naming, read, read_variant

#: How many names a message lists at most.
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class FilePlanner(SearchedPlanner):
    """Reads its plans from a file."""

    config: FileConfig

    #: The micro-batches are those of the file.
    chooses_variants = True

    def propose(self, context: PlanContext) -> Strategy:
        """Return the strategy of the file, with predictions for this cluster.

        Raises:
            ConfigError: the file cannot be read; its strategy is for another graph or mesh, or is
                illegal (see `check_strategy`).
        """
        request = context.request
        path = Path(self.config.path)
        with naming(path):
            # Names are looked up in the graph of the variant that the file is for.
            variant = read_variant(path, request.family)
            request = _of(request, variant)
            found, lines = read(path, request.graph)
            self._check(found, request, lines)
            strategy = replace(
                found, planner="file", graph_hash=graph_hash(request.graph), report={}
            )
            on_host = request.offloaded | offloaded_states(strategy)
            strategy = with_states(request, strategy, on_host)
            # Predictions need a legal strategy.
            check_strategy(request.graph, strategy, lines)
            predicted = predict_cost(request.graph, strategy, request.cluster, request.options)
        strategy = replace(strategy, variant=variant if request.family is None else None)
        told = strategy.report.get("explanation", ())
        explanation = [f"as {path} says, made by planner {found.planner}", *told]
        report = {**strategy.report, **predicted, "explanation": explanation}
        return replace(strategy, report=report)

    def _check(self, read: Strategy, request: PlanRequest, lines: Lines) -> None:
        """Check that a strategy is for the mesh, the micro-batches and the graph of a request.

        Raises:
            ConfigError: it is for another mesh, number of micro-batches or graph.
        """
        check_mesh(read, request.mesh, lines)
        count = request.graph.num_micro_batches
        if read.num_micro_batches != count:
            where = lines.where(["num_micro_batches"])
            raise _other_count(read.num_micro_batches, count, where)
        _check_names(read, request.graph, lines)
        if read.graph_hash != graph_hash(request.graph) and not self.config.allow_other_graph:
            raise ConfigError(
                "the strategy was made for another graph of the same names: shapes, operators or "
                "settings of the step differ",
                where=lines.where(["graph_hash"]),
                accepted=f"a strategy with graph_hash: {graph_hash(request.graph)}",
                todo="run what made the strategy, or set planner.allow_other_graph=true",
            )


def _other_count(read: int, asked: int, where: str | Sequence[str] = "") -> ConfigError:
    return ConfigError(
        f"the strategy is for {read} micro-batches, the step has {asked}",
        where=where,
        todo=f"set trainer.micro_batches={read}",
    )


def _of(request: PlanRequest, variant: GraphVariant | None) -> PlanRequest:
    """Return the request for a variant of the step, if it may be chosen.

    Raises:
        ConfigError: its number of micro-batches may not be chosen.
    """
    family = request.family
    if variant is None or family is None or variant == family.variant:
        return request
    if variant.num_micro_batches not in family.micro_batches:
        raise _other_count(variant.num_micro_batches, request.graph.num_micro_batches)
    may = (variant.recompute_bytes is None or family.may_recompute) and (
        not variant.slices or family.may_slice
    )
    return request.of(variant) if may else request


def _check_names(read: Strategy, graph: LogicalGraph, lines: Lines) -> None:
    """Check that a strategy decides on every value of the graph, and on nothing else.

    Raises:
        ConfigError: it does not.
    """
    inputs = {e.name for e in graph.inputs if isinstance(graph.types[e.name], TensorType)}
    nodes = {node.name for node in graph.nodes if not node.is_host}
    for section, found, wanted in (
        ("storage", read.storage.keys(), inputs),
        ("nodes", read.nodes.keys(), nodes),
    ):
        stray, lacking = sorted(found - wanted), sorted(wanted - found)
        if not stray and not lacking:
            continue
        raise ConfigError(
            f"{section} of the strategy has names that the step does not have: {_listed(stray)}"
            if stray
            else f"{section} of the strategy does not decide on {_listed(lacking)}",
            where=lines.where([section, *stray[:1]]),
            accepted="a decision for each input and operator of exactly this step",
            todo=suggestion(
                stray[0] if stray else "",
                lacking or wanted,
                "plan again for this model, or correct the file",
            ),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
