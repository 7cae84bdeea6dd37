"""Check that a strategy is legal for a graph: complete, on existing stages, and legal op by op.

A strategy may have been edited by hand or made by any planner. An illegal strategy would run and
give wrong numbers, so nothing is compiled before it has passed this check.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

from sbp_core.errors import PlanError, SbpError
from sbp_core.graph.ir import LogicalGraph, Node, OutputKind, Phase, Rate
from sbp_core.sbp import check_sbp
from sbp_core.serialize import Lines
from sbp_core.signatures.arguments import call_key
from sbp_core.signatures.assignment_check import check_signature
from sbp_core.signatures.call import OpCall
from sbp_core.strategy import Assignment, Strategy


def check_strategy(graph: LogicalGraph, strategy: Strategy, lines: Lines | None = None) -> None:
    """Check that a strategy decides everything about a graph, and all of it legally.

    Args:
        graph: The graph.
        strategy: The strategy to check.
        lines: Lines of the file that the strategy comes from, for messages.

    Raises:
        PlanError: an op or a state has no assignment, the micro-batches differ, a stage does not
            exist, an offloaded state is needed outside of the update, or several ranks would have
            to draw the same random numbers.
        SignatureError: an op may not be cut as in the strategy, or has no rule.
        SbpValueError: an SBP does not fit the shape of its tensor or the mesh.
    """
    _check_complete(graph, strategy, lines)
    _check_stages(strategy)
    _check_offloaded(graph, strategy, lines)
    checked: set[tuple[str, Assignment]] = set()
    for node in graph.nodes:
        if not node.is_host:
            found = strategy.nodes[node.name]
            mesh = strategy.stages[found.stage]
            call = OpCall.of(graph, node)
            # Repeated layers make the same calls.
            what = (call_key(call), found)
            if what not in checked:
                with _naming("nodes", node.name, lines):
                    check_signature(call, found.signature, mesh)
                checked.add(what)
            _check_draws(node, len(mesh.rank_list))
    for entry in graph.inputs:
        if graph.is_tensor(entry.name):
            storage = strategy.storage[entry.name]
            mesh_shape = strategy.stages[storage.stage].mesh_shape
            with _naming("storage", entry.name, lines):
                check_sbp(graph.tensor(entry.name).shape, storage.sbp, mesh_shape, stored=True)


@contextmanager
def _naming(section: str, name: str, lines: Lines | None) -> Iterator[None]:
    """Add the decision, and where it is in the file, to an error of the `with` block."""
    try:
        yield
    except SbpError as error:
        places = (lines.where((section, name)),) if lines else ()
        # An error about a call already names its node.
        decision = () if section == "nodes" else (f"{section} of {name}",)
        raise error.replaced(type(error), where=(*places, *error.where, *decision)) from error


def _check_draws(node: Node, num_ranks: int) -> None:
    """Refuse a draw from PyTorch's generator: each rank would draw different numbers."""
    if num_ranks > 1 and "seeded" in node.tags:
        raise PlanError(
            f"{node.op} would draw other random numbers on each of {num_ranks} ranks",
            where=node.where(),
            accepted="sbp.random_uniform, sbp.random_normal, sbp.random_bernoulli, ...",
            todo="draw with these, or set dropout to zero",
        )


def _check_complete(graph: LogicalGraph, strategy: Strategy, lines: Lines | None) -> None:
    ops = {node.name for node in graph.nodes if not node.is_host}
    states = {entry.name for entry in graph.inputs if graph.is_tensor(entry.name)}
    missing = sorted((ops - set(strategy.nodes)) | (states - set(strategy.storage)))
    if missing or strategy.num_micro_batches != graph.num_micro_batches:
        place = ["nodes"] if missing else ["num_micro_batches"]
        where = [f"{name} has no assignment" for name in missing[:5]]
        where = where or [f"it is for {strategy.num_micro_batches} micro-batches"]
        raise PlanError(
            f"the strategy of planner {strategy.planner!r} does not cover the graph",
            where=[*([lines.where(place)] if lines else ()), *where],
            accepted=f"every op and state, {graph.num_micro_batches} micro-batches",
            todo="plan again for exactly this graph",
        )


def _check_offloaded(graph: LogicalGraph, strategy: Strategy, lines: Lines | None) -> None:
    """Check that offloaded tensors are states that the optimizer alone uses, once a step."""
    offloaded = {name for name, storage in strategy.storage.items() if storage.offloaded}
    wrong = _not_offloadable(graph, offloaded) if offloaded else {}
    if wrong:
        name = min(wrong)
        raise PlanError(
            f"{name!r} cannot be offloaded: {wrong[name]}",
            where=lines.where(("storage", name)) if lines else f"storage of {name}",
            accepted="states that only the optimizer uses, once a step, such as its moments",
            todo="leave out 'host' after its nd-SBP",
        )


def offloadable(graph: LogicalGraph) -> tuple[str, ...]:
    """Return the tensors that may be in host memory: states that the optimizer alone uses."""
    names = [entry.name for entry in graph.inputs if graph.is_tensor(entry.name)]
    wrong = _not_offloadable(graph, set(names))
    return tuple(name for name in names if name not in wrong)


def _not_offloadable(graph: LogicalGraph, names: AbstractSet[str]) -> dict[str, str]:
    """Return why some tensors may not be in host memory, by name."""
    written = {one.value: one.name for one in graph.outputs if one.kind is OutputKind.STATE}
    wrong: dict[str, str] = {}
    for name in names:
        kind = graph.input_kinds[name].kind
        if not kind.is_state:
            wrong[name] = f"it is of kind {kind.value!r}"
    for node in graph.nodes:
        if node.phase is Phase.OPTIMIZER and node.rate is Rate.STEP:
            continue
        made = {written[value] for value in node.outputs if value in written}
        for name in names & {*node.inputs(), *made}:
            often = "once a step" if node.rate is Rate.STEP else f"for each {node.rate.value}"
            what = "is made" if name in made else "is needed"
            wrong.setdefault(
                name, f"it {what} in the {node.phase.value} phase {often}, by {node.name!r}"
            )
    return wrong


def _check_stages(strategy: Strategy) -> None:
    chosen = [(name, entry.stage) for name, entry in strategy.nodes.items()]
    chosen += [(name, entry.stage) for name, entry in strategy.storage.items()]
    for name, stage in chosen:
        if stage not in range(len(strategy.stages)):
            raise PlanError(
                f"{name!r} is on stage {stage}",
                where=f"the strategy of planner {strategy.planner!r}",
                accepted=f"stages 0 .. {len(strategy.stages) - 1}",
            )
