"""What a plan looks like: a table by module and op, with SBPs, boxing and bytes. Imports no torch.

Equal rows of repeated layers are folded into one, with their number. The whole table, a row for
each op, goes to a file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sbp_core.boxing import Step, StepKind
from sbp_core.check import CheckReport
from sbp_core.compile.lower import lower
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.graph.ir import LogicalGraph, Phase, Rate
from sbp_core.placement import Placement
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op of the plan: where it stands, how it is cut, and the boxing of its inputs."""

    phase: str
    stage: int
    module: str
    kind: str
    inputs: str
    outputs: str
    boxing: str
    moved_bytes: int


def plan_rows(graph: LogicalGraph, strategy: Strategy) -> Iterator[Row]:
    """Yield a row for each op, in graph order.

    Its boxing is that of its inputs, and behind "then" what its result needs as a new state, a loss
    or a metric.
    """
    before: dict[str, list[Step]] = defaultdict(list)
    after: dict[str, list[Step]] = defaultdict(list)
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
            module=node.module or _owner(node.name) or "(root)",
            kind=node.kind.removeprefix("_"),
            inputs=" ".join(f"({sbp})" for sbp in assigned.signature.inputs),
            outputs=" ".join(f"({sbp})" for sbp in assigned.signature.outputs),
            boxing=text,
            moved_bytes=moved[node.name],
        )


def _owner(name: str) -> str:
    """Return the parameter that an update belongs to."""
    return name.split(".update.")[0] if ".update." in name else ""


def _step_text(step: Step) -> str:
    if step.kind is StepKind.TRANSFER:
        return f"transfer to {_ranks_text(step.target[0])}"
    axes = ", ".join(step.source[0].axes[axis] for axis in step.axes)
    if step.kind is StepKind.LOCAL:
        return f"local {step.target[1][step.axes[0]]} ({axes})".replace('"', "")
    return f"{step.kind.value} ({axes})"


def _ranks_text(placement: Placement) -> str:
    ranks = placement.rank_list
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _stage_text(placement: Placement) -> str:
    mesh = f": {_mesh_text(placement)}" if placement.size > 1 else ""
    return _ranks_text(placement) + mesh


def _mesh_text(placement: Placement) -> str:
    pairs = zip(placement.axes, placement.mesh_shape, strict=True)
    return " x ".join(f"{axis} {size}" for axis, size in pairs)


def plan_table(rows: Sequence[Row], max_rows: int, width: int, todo: str = "") -> Table:
    """Return the table that is printed: repeated layers are folded into one row.

    Args:
        rows: As `plan_rows` gives them.
        max_rows: Rows beyond it are left out and counted in the caption: views and rows without
            boxing go first, updates next.
        width: Characters of a line; below 120 two lines a row.
        todo: How to see the rows that are left out, for the caption.
    """
    folded = Counter(map(_fold, rows))
    moved: Counter[Row] = Counter()
    for row in rows:
        moved[_fold(row)] += row.moved_bytes
    order = {row: index for index, row in enumerate(folded)}
    kept = sorted(folded, key=lambda row: (_rank(row, moved[row]), order[row]))[:max_rows]
    table = Table(title="The plan", header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    wide = width >= _WIDE
    columns = _COLUMNS if wide else _NARROW_COLUMNS
    shared = width - _BYTES_WIDTH - _GAP * (len(columns) + 1)
    for head, share in columns.items():
        table.add_column(head, overflow="fold", width=int(shared * share))
    table.add_column("bytes/step", justify="right", no_wrap=True, width=_BYTES_WIDTH)
    staged = len({row.stage for row in rows}) > 1
    for row in sorted(kept, key=order.__getitem__):
        module = row.module + (f" x{folded[row]}" if folded[row] > 1 else "")
        phase = _SHORT[row.phase] + (f" {row.stage}" if staged else "")
        cells = [phase, module, row.kind, row.inputs, row.outputs]
        if not wide:
            cells = [f"{module}\n  {row.kind}, {phase}", f"{row.inputs}\n-> {row.outputs}"]
        size = format_bytes(moved[row]) if moved[row] else "-"
        table.add_row(*cells, row.boxing or "-", size)
    hidden = len(folded) - len(kept)
    if hidden:
        kinds = "kinds of rows" if hidden > 1 else "kind of row"
        table.caption = f"{hidden} further {kinds}" + (f": {todo}" if todo else "")
    return table


_WIDE = 120
_GAP, _BYTES_WIDTH = 3, 10

#: Columns and their shares of the line. Explicit, since a column that asks for a least width of its
#: own pushes the last one off the line.
_COLUMNS = {
    "phase": 0.07,
    "module": 0.27,
    "op": 0.17,
    "inputs": 0.19,
    "outputs": 0.13,
    "boxing": 0.17,
}
_NARROW_COLUMNS = {"module, op": 0.45, "SBP": 0.3, "boxing": 0.25}
_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "update"}


def _fold(row: Row) -> Row:
    """Return the row that stands for all equal rows of repeated layers."""
    return replace(row, module=_LAYER.sub("*", row.module), moved_bytes=0)


_VIEWS = ("view", "t", "transpose", "split", "unsafe_view", "clone", "reshape", "cat", "expand")


def _rank(row: Row, moved: int) -> int:
    if moved:
        return 0
    if row.kind in _VIEWS:
        return 3
    return 2 if row.phase == Phase.OPTIMIZER.value else 1


def plan_text(rows: Sequence[Row]) -> str:
    """Return every row as a line of tab-separated text."""
    names = ("phase", "stage", "module", "op", "inputs", "outputs", "boxing", "bytes")
    lines = ["\t".join(names)]
    for row in rows:
        cells = (row.phase, row.stage, row.module, row.kind, row.inputs, row.outputs, row.boxing)
        lines.append("\t".join(map(str, (*cells, row.moved_bytes))))
    return "\n".join(lines) + "\n"


def counted(number: int, word: str, plural: str = "s") -> str:
    """Return a number with its word: `1 step`, `3 steps`."""
    return f"{number} {word}{plural * (number != 1)}"


def summary(plan: PhysicalPlan, strategy: Strategy, checked: CheckReport) -> list[str]:
    """Return the lines under the table: what the plan is, moves and needs, and the planner's why.

    The latter is `explanation` of the strategy's report: a list of lines.
    """
    actors = sum(len(part.actors) for part in plan.ranks)
    kinds = Counter(
        plan.steps[index].kind.value
        for index in {a.step for p in plan.ranks for a in p.actors}
        if index >= 0
    )
    if len(plan.stages) > 1:
        meshes = "; ".join(map(_stage_text, plan.stages))
    else:
        meshes = _mesh_text(plan.stages[0])
    steps = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
    worst = max(checked.memory.values(), key=lambda memory: memory.peak)
    lines = [
        f"planner {strategy.planner}: {counted(len(plan.ranks), 'rank')}, "
        f"{counted(len(plan.stages), 'stage')} ({meshes}), "
        f"{counted(plan.num_micro_batches, 'micro-batch', 'es')}",
        f"boxing in a step: {steps}; {format_bytes(plan.boxing_bytes)} between ranks",
        f"{actors} actors, {checked.num_firings} firings a step; proved live and bounded",
        f"memory of a rank: at most {format_bytes(worst.peak)}, "
        f"{format_bytes(worst.states)} of it states",
    ]
    predicted = strategy.report.get("predicted_step_s")
    if predicted is not None:
        lines.append(f"predicted time of a step: {format_seconds(predicted)}")
    return [*lines, *strategy.report.get("explanation", ())]
