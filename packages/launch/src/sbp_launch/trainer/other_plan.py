"""Compile a saved strategy of the same model, maybe of another mesh, for `sbp-plan compare=`."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.compile import check_strategy
from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PIPE_AXIS
from sbp_core.placement import Placement
from sbp_core.plugins import ClusterFactory
from sbp_core.strategy import Strategy
from sbp_launch.planning.flow import Captured, Planned, compiled
from sbp_launch.run.run import Run
from sbp_launch.step.step_planner import StepPlanner
from sbp_launch.trainer.planned import planner_of
from sbp_launch.trainer.run_program import RunProgram

#: The largest number of names that a message lists.
_MOST_NAMES = 3


def planned_as(strategy: Strategy, planner: StepPlanner, run: Run, program: RunProgram) -> Planned:
    """Return the checked plan of a strategy, with the strategy's ranks and micro-batches.

    Args:
        strategy: A strategy that was read from a file.
        planner: The planner of the run; its captured step is reused if it fits.
        run: The run.
        program: The one-device program.

    Raises:
        ConfigError: the strategy is for another model, or not legal for this one.
    """
    known = planner
    if not _fits(planner.captured, strategy):
        known = _captured_for(strategy, run, program)
    graph = _fits(known.captured, strategy)
    if graph is None:
        raise _of_another_model(strategy, known.captured.graph)
    settings = known.settings
    if (last := max(strategy.ranks)) >= settings.cluster.num_devices:
        make: ClusterFactory = run.make("cluster")
        settings = replace(settings, cluster=make(last + 1))
    try:
        check_strategy(graph, strategy)
        return compiled(graph, strategy, settings)
    except SbpError as error:
        raise error.replaced(ConfigError, where=("compare", *error.where)) from error


def _captured_for(strategy: Strategy, run: Run, program: RunProgram) -> StepPlanner:
    """Capture the step for the mesh and the number of micro-batches of a strategy.

    Raises:
        ConfigError: the batch does not divide into that number of micro-batches.
    """
    # The config refuses a number that does not divide the batch.
    trainer = replace(run.config.trainer, micro_batches=strategy.num_micro_batches)
    known = replace(run, config=replace(run.config, trainer=trainer))
    return planner_of(known, replace(program, mesh=_mesh_of(strategy)))


def _mesh_of(strategy: Strategy) -> Placement:
    """Return the mesh of all stages, which are the positions along the axis `pipe`."""
    first = strategy.stages[0]
    if len(strategy.stages) == 1:
        return first
    if len({stage.mesh_shape for stage in strategy.stages}) > 1:
        # Stages differ in size: a graph depends only on the fact that there are several stages.
        ranks = [[stage.rank_list[0]] for stage in strategy.stages]
        return Placement(ranks, (PIPE_AXIS, "rank"), first.device)
    distinct = {stage.rank_list: stage for stage in strategy.stages}
    ranks_of = [stage.ranks for stage in distinct.values()]
    return Placement(ranks_of, (PIPE_AXIS, *first.axes), first.device)


def _fits(captured: Captured, strategy: Strategy) -> LogicalGraph | None:
    """Return the version of a step that a strategy fits; None if it fits neither."""
    forms = [captured.graph, *([captured.whole] if captured.whole is not None else [])]
    for graph in forms:
        nodes = {node.name for node in graph.nodes if not node.is_host}
        inputs = {entry.name for entry in graph.inputs if graph.is_tensor(entry.name)}
        if (
            nodes == set(strategy.nodes)
            and inputs == set(strategy.storage)
            and graph.num_micro_batches == strategy.num_micro_batches
        ):
            return graph
    return None


def _of_another_model(strategy: Strategy, graph: LogicalGraph) -> ConfigError:
    nodes = {node.name for node in graph.nodes if not node.is_host}
    stray, lacking = sorted(set(strategy.nodes) - nodes), sorted(nodes - set(strategy.nodes))
    named = [
        f"it {verb} {', '.join(names[:_MOST_NAMES])}"
        for verb, names in (("decides on", stray), ("does not decide on", lacking))
        if names
    ]
    return ConfigError(
        "the strategy to compare with is for another model or other settings of the step",
        where=("compare", *named),
        accepted="a strategy of this model, of the same size, optimizer and passes",
        todo="set model, optimizer, compile and trainer.batch_size as it was made with",
    )
