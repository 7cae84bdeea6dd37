"""The rows of a plan: a row for each op, with SBPs, boxing and bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.compile import lower
from sbp_core.graph import LogicalGraph, Rate
from sbp_core.placement import Placement
from sbp_core.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op of the plan: where it stands, how it is cut, and the boxing of its inputs.

    `num_steps` is the number of boxing steps in `boxing`, and `moved_bytes` what they send between
    ranks in a training step.
    """

    phase: str
    stage: int
    module: str
    kind: str
    inputs: str
    outputs: str
    boxing: str
    moved_bytes: int
    num_steps: int


def plan_rows(graph: LogicalGraph, strategy: Strategy) -> Iterator[Row]:
    """Yield a row for each op, in graph order.

    Its boxing is that of its inputs, and behind "then" what its result needs as a new state, a loss
    or a metric.
    """
    before: dict[str, list[BoxingStep]] = defaultdict(list)
    after: dict[str, list[BoxingStep]] = defaultdict(list)
    moved: Counter[str] = Counter()
    lowered = lower(graph, strategy)
    for item in lowered.items:
        if item.step is None:
            continue
        value = lowered.held[item.outputs[0]].value
        repeats = graph.num_micro_batches if item.rate is Rate.MICRO else 1
        if item.asked_by:
            before[item.asked_by].append(item.step)
            moved[item.asked_by] += repeats * item.step.size_bytes
        else:
            after[value].append(item.step)
            moved[graph.producers[value].name] += repeats * item.step.size_bytes
    for node in graph.nodes:
        if node.is_host:
            continue
        assigned = strategy.nodes[node.name]
        own = before[node.name]
        leaving = [step for value in node.outputs for step in after[value]]
        text = ", ".join(map(_step_text, own))
        if leaving:
            text += ("; " if text else "") + "then " + ", ".join(map(_step_text, leaving))
        yield Row(
            phase=node.phase.value,
            stage=assigned.stage,
            module=_owner(node.name) or node.module or "(root)",
            kind=node.kind.removeprefix("_"),
            inputs=" ".join(f"({sbp})" for sbp in assigned.signature.inputs),
            outputs=" ".join(f"({sbp})" for sbp in assigned.signature.outputs),
            boxing=text,
            moved_bytes=moved[node.name],
            num_steps=len(own) + len(leaving),
        )


def plan_text(rows: Sequence[Row]) -> str:
    """Return every row as a line of tab-separated text."""
    names = ("phase", "stage", "module", "op", "inputs", "outputs", "boxing", "bytes")
    lines = ["\t".join(names)]
    for row in rows:
        cells = (row.phase, row.stage, row.module, row.kind, row.inputs, row.outputs, row.boxing)
        lines.append("\t".join(map(str, (*cells, row.moved_bytes))))
    return "\n".join(lines) + "\n"


def _owner(name: str) -> str:
    """Return the parameter that an update belongs to."""
    return name.split(".update.")[0] if ".update." in name else ""


def _step_text(step: BoxingStep) -> str:
    if step.kind is StepKind.TRANSFER:
        return f"transfer to {ranks_text(step.target[0])}"
    axes = ", ".join(step.source[0].axes[axis] for axis in step.axes)
    if step.kind is StepKind.LOCAL:
        return f"local {step.target[1][step.axes[0]]} ({axes})".replace('"', "")
    return f"{step.kind.value} ({axes})"


def ranks_text(placement: Placement) -> str:
    """Return the ranks of a placement: `ranks 0, 1`."""
    ranks = placement.rank_list
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
