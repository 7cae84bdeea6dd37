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
from sbp_core.memory.report import MemoryReport
from sbp_core.placement import Placement
from sbp_core.signatures.views import is_view
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds

_LAYER = re.compile(r"(?<=\.)\d+(?=\.|$)")


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
            module=_owner(node.name) or node.module or "(root)",
            kind=node.kind.removeprefix("_"),
            inputs=" ".join(f"({sbp})" for sbp in assigned.signature.inputs),
            outputs=" ".join(f"({sbp})" for sbp in assigned.signature.outputs),
            boxing=text,
            moved_bytes=moved[node.name],
            num_steps=len(own) + len(leaving),
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
        max_rows: Rows beyond it are left out and counted in the caption: those that move most
            bytes stay, then those of forward and backward.
        width: Characters of a line; below 120 inputs are left out.
        todo: How to see the rows that are left out, for the caption.
    """
    folded = Counter(map(_fold, rows))
    moved: Counter[Row] = Counter()
    for row in rows:
        moved[_fold(row)] += row.moved_bytes
    order = {row: index for index, row in enumerate(folded)}
    kept = sorted(folded, key=lambda row: (_rank(row, moved[row]), order[row]))[:max_rows]
    staged = len({row.stage for row in rows}) > 1
    # Between columns rich puts a space of padding on the right, and one for the box.
    table = Table(
        title="The plan",
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for head, column in _widths(width, staged).items():
        right = head == _BYTES
        table.add_column(
            head,
            overflow="fold",
            width=column,
            justify="right" if right else "left",
            no_wrap=right,
        )
    for row in sorted(kept, key=order.__getitem__):
        module = row.module + (f" x{folded[row]}" if folded[row] > 1 else "")
        phase = _SHORT[row.phase] + (f" {row.stage}" if staged else "")
        inputs = (row.inputs,) if width >= _WIDE else ()
        size = format_bytes(moved[row]) if moved[row] else "-"
        cells = (phase, module, row.kind, *inputs, _short(row.outputs), row.boxing or "-", size)
        table.add_row(*cells)
    hidden = len(folded) - len(kept)
    if hidden:
        kinds = "kinds of rows" if hidden > 1 else "kind of row"
        table.caption = f"{hidden} further {kinds}" + (f": {todo}" if todo else "")
    return table


#: From so many characters on, inputs have a column.
_WIDE = 120
_GAP = 2

_BYTES = "bytes/step"

#: Characters of the columns that are as wide on every line.
_FIXED = {"phase": 6, "outputs": 12, _BYTES: len(_BYTES)}

#: Shares of the other columns in the rest of the line; boxing has what they leave. Explicit, since
#: a column that asks for a least width of its own pushes the last one off the line.
_SHARES = {"module": 0.38, "op": 0.19, "inputs": 0.21}
_NARROW_SHARES = {"module": 0.54, "op": 0.17}


def _widths(width: int, staged: bool) -> dict[str, int]:
    """Return the characters of each column on a line of `width`."""
    shares = _SHARES if width >= _WIDE else _NARROW_SHARES
    fixed = _FIXED | ({"phase": 8} if staged else {})
    heads = ("phase", "module", "op", "inputs", "outputs", "boxing", _BYTES)
    shown = [head for head in heads if head in fixed or head in shares or head == "boxing"]
    rest = width - sum(fixed.values()) - _GAP * (len(shown) - 1)
    shared = {head: int(rest * share) for head, share in shares.items()}
    widths = fixed | shared | {"boxing": rest - sum(shared.values())}
    return {head: widths[head] for head in shown}


#: Parts of a rank's memory below this share of its peak are summed up.
_LEAST_SHARE = 0.01

_SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "update"}


def _short(outputs: str) -> str:
    """Return the SBPs of outputs; of several equal ones, one with their number."""
    parts = re.findall(r"\((?:[^()]|\(\d+\))*\)", outputs)
    same = len(parts) > 1 and len(set(parts)) == 1
    return f"{parts[0]} x{len(parts)}" if same else outputs


def _fold(row: Row) -> Row:
    """Return the row that stands for all equal rows of repeated layers."""
    return replace(row, module=_LAYER.sub("*", row.module), moved_bytes=0)


_COPIES = ("clone", "cat")


def _rank(row: Row, moved: int) -> tuple[int, int]:
    """Return what rows are sorted by, where only some can be shown."""
    if moved:
        return 0, -moved
    if row.kind in _COPIES or is_view(f"aten.{row.kind}"):
        return 3, 0
    return (2 if row.phase == Phase.OPTIMIZER.value else 1), 0


def legend(strategy: Strategy) -> str:
    """Return what the words of the table mean, in one line."""
    axes = ", ".join(strategy.stages[0].axes)
    return (
        f"by axis ({axes}): S(d) split along dim d, B whole, P parts of a sum; "
        f"local: nothing is sent"
    )


def memory_lines(plan: PhysicalPlan, memory: MemoryReport | str) -> list[str]:
    """Return for each stage what the rank holds at its peak that needs most.

    Args:
        plan: Whose memory it is.
        memory: Of each rank, or why it is not known.
    """
    if isinstance(memory, str):
        return [f"memory by kind is not known: {memory}"]
    found = memory.ranks
    lines = []
    for index, stage in enumerate(plan.stages):
        worst = max((found[rank] for rank in stage.rank_list), key=lambda rank: rank.peak)
        kinds = sorted(worst.kinds.items(), key=lambda entry: -entry[1])
        parts = [(kind.value, n) for kind, n in kinds if n >= _LEAST_SHARE * worst.peak]
        if rest := worst.peak - sum(size for _, size in parts):
            parts.append(("other", rest))
        text = " + ".join(f"{format_bytes(size)} {name}" for name, size in parts)
        of = f"a rank of stage {index}" if len(plan.stages) > 1 else "a rank"
        lines.append(f"memory of {of} at its peak: {format_bytes(worst.peak)}")
        lines.append(f"  = {text}")
    return lines


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


def summary(
    plan: PhysicalPlan, strategy: Strategy, checked: CheckReport, rows: Sequence[Row]
) -> list[str]:
    """Return the lines under the table: what the plan is and moves, and the planner's why.

    The latter is `explanation` of the strategy's report: a list of lines. The plan may have fewer
    boxing steps than its rows, as small gradients travel together.
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
    unmerged = sum(row.num_steps for row in rows)
    if unmerged > kinds.total():
        steps += f", merged from {unmerged}"
    lines = [
        f"planner {strategy.planner}: {counted(len(plan.ranks), 'rank')}, "
        f"{counted(len(plan.stages), 'stage')} ({meshes}), "
        f"{counted(plan.num_micro_batches, 'micro-batch', 'es')}",
        f"boxing in a step: {steps}; {format_bytes(plan.boxing_bytes)} between ranks",
        f"{actors} actors, {checked.num_firings} firings a step; proved live and bounded",
    ]
    predicted = strategy.report.get("predicted_step_s")
    if predicted is not None:
        lines.append(f"predicted time of a step: {format_seconds(predicted)}")
    return [*lines, *strategy.report.get("explanation", ())]
