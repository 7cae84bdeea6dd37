"""Plan further steps on the states (parameters, moments) of a training step, without moving them.

Such steps are evaluations, other programs on these states, and other forms of the step: for other
batch shapes, or after a change of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace

from sbp_core.compile import check_strategy
from sbp_core.errors import PlanError, SbpError
from sbp_core.graph import InputKind, LogicalGraph, Phase
from sbp_core.infer import infer_strategy
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Storage, Strategy
from sbp_launch.planning.flow import Captured, Planned, PlanSettings, check_fits, compiled

#: Plans a graph with pins: SBP by name.
PlanAround = Callable[[LogicalGraph, Mapping[str, str]], Strategy]


def plan_form(
    train: Planned,
    captured: Captured,
    settings: PlanSettings,
    plan: PlanAround,
    stored: Mapping[str, str],
    counted: Collection[str],
    *,
    has_pins: bool = False,
) -> Planned:
    """Plan another step on the states of a training step, which stay where they are.

    If the operators and inputs are the same, the strategy of the training step is used. Otherwise,
    if there are new states, the planner is called. Without new states, or if the planner moves a
    present state, the signatures of operators are inferred around the states.

    Args:
        train: The training step.
        captured: The other step: for another batch, a changed program, or another program.
        settings: Settings of the other step.
        plan: The planner.
        stored: SBP of all present states, by name.
        counted: States that are kept as host numbers. They, and new states of the optimizer, are
            left out if nothing uses them.
        has_pins: Whether the user has given pins: then the planner is always called, and its
            errors are raised.

    Raises:
        SbpError: with `has_pins`, the planner raises it.
        PlanError: the training step uses stale parameters; or, with pins, a state would move.
        ConfigError: a rank would not fit its memory.
    """
    known = train.strategy
    if any(known.staleness):
        raise PlanError(
            "the plan trains on stale parameters, which another form of the step does not have",
            accepted="plans without staleness",
        )

    def around(graph: LogicalGraph) -> Strategy:
        names = {node.name for node in graph.nodes if not node.is_host}
        inputs = {entry.name for entry in graph.inputs if graph.is_tensor(entry.name)}
        if names == known.nodes.keys() and inputs == known.storage.keys():
            with suppress(SbpError):
                check_strategy(graph, known)
                return known
        pins = {name: str(known.storage[name].sbp) for name in inputs if name in known.storage}
        pins |= {name: sbp for name, sbp in stored.items() if name in inputs}
        has_new = any(e.kind.is_state and e.name in inputs - pins.keys() for e in graph.inputs)
        if has_new or has_pins:
            with nullcontext() if has_pins else suppress(SbpError):
                found = plan(graph, pins)
                moved = [n for n, sbp in pins.items() if str(found.storage[n].sbp) != sbp]
                if has_pins and (moved := [n for n in moved if n in stored]):
                    raise PlanError(
                        f"{moved[0]!r} is stored as ({stored[moved[0]]}), and the pins move it to "
                        f"({found.storage[moved[0]].sbp})",
                        accepted="pins of new states, and of tensors that are not states",
                    )
                stays = all(
                    found.storage[name].stage == entry.stage
                    for name, entry in known.storage.items()
                    if name in inputs
                )
                if found.stages == known.stages and stays and not moved:
                    return found
        modules = _stage_modules(train, graph)
        found = infer_strategy(
            PlanRequest(graph=graph, mesh=settings.mesh, cluster=settings.cluster),
            planner=known.planner,
            pins=pins,
            stages=known.stages,
            stage_patterns=modules if len(modules) > 1 else (),
            in_flight=known.in_flight,
        )
        return replace(
            found, storage=_where_unread_lies(train, graph, found), regather=known.regather
        )

    left_out = {*counted, *_new_states(captured.graph, known)}
    graph, strategy = captured.drop_unused_inputs(left_out).planned(around)
    made = compiled(graph, strategy, settings)
    check_fits(made, settings.cluster)
    return made


def _new_states(graph: LogicalGraph, known: Strategy) -> list[str]:
    return [
        entry.name
        for entry in graph.inputs
        if entry.kind is InputKind.OPTIMIZER_STATE and entry.name not in known.storage
    ]


def plan_on_states(train: Planned, graph: LogicalGraph, settings: PlanSettings) -> Planned:
    """Plan forward and loss, with states, batch entries and modules on the same ranks as training.

    Args:
        train: The training step.
        graph: A graph of `capture_forward`, over the same model.
        settings: Settings of the training step.

    Raises:
        ConfigError: a rank would not fit its memory.
    """
    stored = {name: str(entry.sbp) for name, entry in train.strategy.storage.items()}
    modules = _stage_modules(train, graph)
    pins = {
        e.name: stored[e.name] for e in graph.inputs if e.kind.is_state or e.kind is InputKind.BATCH
    }
    strategy = infer_strategy(
        PlanRequest(graph=graph, mesh=settings.mesh, cluster=settings.cluster),
        planner=train.strategy.planner,
        pins=pins,
        stages=train.strategy.stages,
        stage_patterns=modules if len(modules) > 1 else (),
        in_flight=(1,) * len(modules),
    )
    storage = _where_unread_lies(train, graph, strategy)
    strategy = replace(strategy, storage=storage, regather=train.strategy.regather)
    made = compiled(graph, strategy, settings)
    check_fits(made, settings.cluster)
    return made


def _where_unread_lies(
    train: Planned, graph: LogicalGraph, strategy: Strategy
) -> dict[str, Storage]:
    """Return the storage of all tensors; those that the graph does not read are as in training.

    Examples are counters of batch norms in an evaluation, and a head that another program trains.
    No operator of the graph gives them a stage.
    """
    known = train.strategy.storage
    return {
        name: known[name] if name in known and not graph.users[name] else entry
        for name, entry in strategy.storage.items()
    }


def _stage_modules(train: Planned, graph: LogicalGraph) -> list[list[str]]:
    """Return the modules of another graph by stages of the training step.

    Modules that only the other graph has are on the stages of the states that they read.
    """
    modules: list[list[str]] = [[] for _ in train.strategy.stages]
    left = {node.module for node in graph.nodes}  # an evaluation has no dropout, for example
    for node in train.graph.nodes:
        if node.name in train.strategy.nodes and node.phase is Phase.FORWARD and node.module:
            stage = train.strategy.nodes[node.name].stage
            if node.module in left and node.module not in modules[stage]:
                modules[stage].append(node.module)
    placed = {module for held in modules for module in held}
    for node in graph.nodes:
        read = [
            train.strategy.storage[n].stage for n in node.inputs() if n in train.strategy.storage
        ]
        if node.phase is Phase.FORWARD and node.module and node.module not in placed and read:
            modules[max(read)].append(node.module)
            placed.add(node.module)
    return modules
