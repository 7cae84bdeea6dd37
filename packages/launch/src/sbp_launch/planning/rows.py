"""List what a plan does, in rows for reports: one for each module of the model, or for each op.

The rows of modules are printed: the SBP of a module's parameters and of its output, and the boxing
around it. The rows of ops are written to the file `plan.txt`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.cluster import Cluster
from sbp_core.compile import LoweredItems
from sbp_core.graph import InputKind, LogicalGraph, Node, OutputKind, Phase
from sbp_core.signatures import is_view
from sbp_core.strategy import Strategy
from sbp_launch.planning.moves import Move, MoveTime, moves, owner_of, ranks_text

_PHASE_ORDER = {phase: index for index, phase in enumerate(Phase)}
_WHEN_ORDER = {when: index for index, when in enumerate(MoveTime)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMove:
    """Boxing steps of one module that happen at the same time in the same way.

    Args:
        when, phase: For example, after forward.
        what: The kind of tensor, with the number if there are several: `2 gradients`.
        kind: The collective, or a transfer.
        how: Axes and change of SBP: `over data: P -> B`.
        sent_bytes: Bytes that all ranks of the stage together send in a training step.
        num_ranks: Number of ranks that send.
        layers: The layers that do this, if some of the layers in the row do not; empty for all.
        time_s: Its time in a training step, in seconds, if each tensor is sent alone and nothing
            overlaps.
    """

    when: MoveTime
    phase: Phase
    what: str
    kind: StepKind
    how: str
    sent_bytes: int
    num_ranks: int
    layers: str = ""
    time_s: float = 0.0

    @property
    def order(self) -> tuple[int, int]:
        """The key by which the moves of a module are sorted."""
        return _PHASE_ORDER[self.phase], _WHEN_ORDER[self.when]

    @property
    def bytes_of_a_rank(self) -> float:
        """Bytes that a rank sends in a training step; the mean, if ranks differ."""
        return self.sent_bytes / self.num_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module on one stage; the row of a module with children has only its own ops.

    Args:
        stage: The stage on which it runs.
        module: Its path; empty for the model itself.
        is_parent: Whether it has children.
        parameters: (name, SBP) of each parameter that it stores.
        output: SBP, after boxing, of the largest tensor that leaves it in the forward phase.
        moves: Boxing around it, in the order forward, backward, update.
        num_parameters: Elements of its parameters, over all ranks; of all layers in the row.
    """

    stage: int
    module: str
    is_parent: bool
    parameters: tuple[tuple[str, str], ...]
    output: str
    moves: tuple[ModuleMove, ...]
    num_parameters: int = 0

    @property
    def bytes_of_a_rank(self) -> float:
        """Bytes that a rank sends in a training step."""
        return sum(move.bytes_of_a_rank for move in self.moves)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One op of the plan.

    Args:
        phase, stage, module: Its place in the step and the model.
        name: Its name in the strategy.
        op: The operator without its namespace.
        inputs, outputs: SBPs of its inputs and outputs.
        before: Boxing of those inputs that it is the first to need.
        after: Boxing of its outputs as new states, loss and metrics.
        sent_bytes: Bytes that this boxing sends in a training step, over all ranks.
    """

    phase: str
    stage: int
    module: str
    name: str
    op: str
    inputs: str
    outputs: str
    before: str
    after: str
    sent_bytes: int


def module_rows(
    graph: LogicalGraph, strategy: Strategy, lowered: LoweredItems, cluster: Cluster
) -> tuple[ModuleRow, ...]:
    """Return a row for each module and stage: by stage, in the order of the forward pass.

    Args:
        graph: The planned graph.
        strategy: Its strategy.
        lowered: The result of `lower` for both.
        cluster: The machine, for the time of boxing.
    """
    found: dict[tuple[int, str], list[Move]] = {}
    nodes: dict[tuple[int, str], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.phase is Phase.FORWARD and not node.is_host:
            nodes[strategy.nodes[node.name].stage, node.module].append(node)
    found.update((key, []) for key in nodes)
    parameters: dict[tuple[int, str], list[tuple[str, str]]] = defaultdict(list)
    numbers: dict[tuple[int, str], int] = defaultdict(int)
    for entry in graph.inputs:
        if entry.kind is InputKind.PARAMETER:
            stored = strategy.storage[entry.name]
            key = stored.stage, owner_of(entry)
            found.setdefault(key, [])
            parameters[key].append((entry.name.rpartition(".")[2], f"({stored.sbp})"))
            numbers[key] += prod(graph.tensor(entry.name).shape)
    for move in moves(graph, lowered, cluster):
        found.setdefault((move.stage, move.module), []).append(move)
    parents = {parent for _, module in found for parent in _parents(module)}
    results = {out.value for out in graph.outputs if out.kind is not OutputKind.STATE}
    rows = [
        ModuleRow(
            stage=stage,
            module=module,
            is_parent=not module or module in parents,
            parameters=tuple(parameters[stage, module]),
            output=_output(graph, strategy, nodes[stage, module], own, results),
            moves=tuple(sorted(_together(own), key=lambda move: move.order)),
            num_parameters=numbers[stage, module],
        )
        for (stage, module), own in found.items()
        if own or parameters[stage, module] or not _only_views(nodes[stage, module])
    ]
    return tuple(sorted(rows, key=lambda row: row.stage))


def _only_views(nodes: Sequence[Node]) -> bool:
    return all(is_view(node.op) for node in nodes)


def _parents(module: str) -> Iterator[str]:
    """Yield the paths of the modules that contain a module, except the root."""
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def _output(
    graph: LogicalGraph,
    strategy: Strategy,
    nodes: Sequence[Node],
    own: Sequence[Move],
    results: Container[str],
) -> str:
    """Return the SBP of a module's largest output in the forward phase; of equal ones, the last.

    Args:
        graph: The planned graph.
        strategy: Its strategy.
        nodes: The nodes of the module.
        own: The boxing around it.
        results: The values that a step returns, without its states.
    """
    names = {node.name for node in nodes}
    boxed = {
        move.value: f"({move.target})"
        for move in own
        if move.when is MoveTime.AFTER and move.phase is Phase.FORWARD
    }
    found, largest = "", -1
    for node in nodes:
        sbps = strategy.nodes[node.name].signature.outputs
        for value, sbp in zip(node.outputs, sbps, strict=True):
            users = graph.users[value]
            leaves = any(u.phase is Phase.FORWARD and u.name not in names for u in users)
            size = graph.tensor(value).size_bytes
            if (leaves or value in results) and size >= largest:
                found, largest = boxed.get(value, f"({sbp})"), size
    return found


def _together(own: Sequence[Move]) -> Iterator[ModuleMove]:
    """Yield a module's moves, with equal ones merged."""
    groups: dict[tuple[Phase, MoveTime, str, StepKind, str, int], list[Move]] = defaultdict(list)
    for move in own:
        key = move.phase, move.when, move.what, move.kind, move.how, move.num_ranks
        groups[key].append(move)
    for (phase, when, what, kind, how, num_ranks), same in groups.items():
        count = len({move.value for move in same})
        yield ModuleMove(
            when=when,
            phase=phase,
            what=f"{count} {what}s" if count > 1 else what,
            kind=kind,
            how=how,
            sent_bytes=sum(move.sent_bytes for move in same),
            num_ranks=num_ranks,
            time_s=sum(move.time_s for move in same),
        )


def op_rows(graph: LogicalGraph, strategy: Strategy, lowered: LoweredItems) -> Iterator[OpRow]:
    """Yield a row for each op, in graph order."""
    before: dict[str, list[BoxingStep]] = defaultdict(list)
    after: dict[str, list[BoxingStep]] = defaultdict(list)
    sent: dict[str, int] = defaultdict(int)
    for item in lowered.items:
        if item.step is None:
            continue
        value = lowered.held[item.outputs[0]].value
        name = item.asked_by or graph.producers[value].name
        (before if item.asked_by else after)[name].append(item.step)
        repeats = graph.repetitions[item.rate]
        sent[name] += repeats * item.step.size_bytes
    for node in graph.nodes:
        if node.is_host:
            continue
        assigned = strategy.nodes[node.name]
        yield OpRow(
            phase=node.phase.value,
            stage=assigned.stage,
            module=node.module or "(root)",
            name=node.name,
            op=node.op.partition(".")[2],
            inputs=" ".join(f"({sbp})" for sbp in assigned.signature.inputs),
            outputs=" ".join(f"({sbp})" for sbp in assigned.signature.outputs),
            before=", ".join(map(_step_text, before[node.name])),
            after=", ".join(map(_step_text, after[node.name])),
            sent_bytes=sent[node.name],
        )


def plan_text(rows: Sequence[OpRow]) -> str:
    """Return every op as a line of tab-separated text, below a header line."""
    names = (
        "phase",
        "stage",
        "module",
        "name",
        "op",
        "input_sbps",
        "output_sbps",
        "boxing_before",
        "boxing_after",
        "sent_bytes_all_ranks",
    )
    lines = ["\t".join(names)]
    for row in rows:
        cells = (row.phase, row.stage, row.module, row.name, row.op, row.inputs, row.outputs)
        lines.append("\t".join(map(str, (*cells, row.before, row.after, row.sent_bytes))))
    return "\n".join(lines) + "\n"


def _step_text(step: BoxingStep) -> str:
    """Return a boxing step as text: `all-reduce (S(0), P) -> (S(0), B)`."""
    (before, source), (after, target) = step.source, step.target
    there = f" to {ranks_text(after)}" if before != after else ""
    return f"{step.kind.value}{there} ({source}) -> ({target})"
