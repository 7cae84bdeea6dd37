"""Write the lines below the printed table of a plan: arithmetic, bytes sent, period, memory.

`output.print_plan` prints most of them for `sbp-plan`, `sbp-train` and `report` of a parallel step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod

from sbp_aten.passes import whole_tables
from sbp_core.boxing import StepKind
from sbp_core.compile import COMMIT, BoxingActor, PhysicalPlan
from sbp_core.graph import LogicalGraph
from sbp_core.memory import MemoryReport
from sbp_core.placement import Placement
from sbp_core.plan_check import CheckReport
from sbp_core.sbp import Split
from sbp_core.signatures import OpCall, work_flop
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_count, format_seconds
from sbp_launch.explaining.pipeline_lines import pipeline_lines
from sbp_launch.planning.rows import ModuleRow
from sbp_launch.planning.utilization import num_parameters, samples_of_step

#: If a rank's share of a step's arithmetic is at least this, it does nearly all of it.
_ALIKE = 0.9

#: Parts of a rank's memory below this share of its peak are added together.
_LEAST_SHARE = 0.01

#: The number of waits of a critical cycle that are printed.
_MOST_WAITS = 3


#: A share of the arithmetic above this multiple of an even share is explained.
_UNEVEN = 1.2


def crowding(num_ranks: int, cores: int) -> list[str]:
    """Return a warning if ranks must share CPU cores."""
    if num_ranks <= cores:
        return []
    return [
        f"warning: {num_ranks} ranks share {format_count(cores, 'core')} and take turns: a step "
        f"takes about {num_ranks / cores:.3g} times as long as with a core for each rank"
    ]


def memory_lines(plan: PhysicalPlan, memory: MemoryReport | str) -> list[str]:
    """Return, for each set of ranks, the memory contents of its fullest rank at the peak.

    A set has the ranks of one stage, or of several stages on the same ranks.

    Args:
        plan: The plan.
        memory: The memory of each rank, or why it is not known.
    """
    if isinstance(memory, str):
        return [f"memory is not known, so no limit was checked: {memory}"]
    found = memory.ranks
    lines = []
    stages_on: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, stage in enumerate(plan.stages):
        stages_on[stage.rank_list].append(index)
    for ranks, stages in stages_on.items():
        worst = max((found[rank] for rank in ranks), key=lambda rank: rank.peak)
        kinds = sorted(worst.kinds.items(), key=lambda entry: -entry[1])
        parts = [(kind.value, n) for kind, n in kinds if n >= _LEAST_SHARE * worst.peak]
        if rest := worst.peak - sum(size for _, size in parts):
            parts.append(("other", rest))
        text = " + ".join(f"{format_bytes(size)} {name}" for name, size in parts)
        of = "a rank"
        if len(plan.stages) > 1:
            of += f" of stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
        lines.append(f"memory of {of} at its peak: {format_bytes(worst.peak)}")
        lines.append(f"  = {text}")
        on_host = max(found[rank].host_peak for rank in ranks)
        if on_host:
            lines.append(f"  and in the memory of its host: {format_bytes(on_host)} offloaded")
    return lines


def arithmetic_lines(graph: LogicalGraph, strategy: Strategy) -> list[str]:
    """Return the share of a step's arithmetic that a rank does, and whether ranks gain by it.

    An operator that is split along no mesh axis of its stage is computed by all its ranks.
    """
    done: dict[int, float] = {}
    total = 0.0
    for node in graph.nodes:
        if node.is_host:
            continue
        assigned = strategy.nodes[node.name]
        stage = strategy.stages[assigned.stage]
        flop = work_flop(OpCall.of(graph, node))
        split = {
            axis
            for sbp in (*assigned.signature.inputs, *assigned.signature.outputs)
            for axis, entry in enumerate(sbp)
            if isinstance(entry, Split)
        }
        total += flop
        part = flop / prod(stage.mesh_shape[axis] for axis in split)
        done[assigned.stage] = done.get(assigned.stage, 0.0) + part
    num_ranks = sum(stage.size for stage in strategy.stages)
    if num_ranks == 1 or not total:
        return []
    share, even = max(done.values()) / total, 1 / num_ranks
    lines = [
        f"arithmetic: a rank does {_percent(share)} of the step's; an even share is "
        f"{_percent(even)}"
    ]
    if share > _UNEVEN * even:
        lines += _uneven_samples(graph, strategy.stages[0])
    if share >= _ALIKE:
        lines.append(
            f"  every rank computes nearly the whole step, so {num_ranks} ranks gain nothing: this "
            "model and batch are too small to split, or too much is pinned to B"
        )
    return lines


def repeated_lines(graph: LogicalGraph) -> list[str]:
    """Return the share of repeated arithmetic, because terms of the loss differ in divisors."""
    done = {True: 0.0, False: 0.0}
    for node in graph.nodes:
        if not node.is_host:
            done["term" in node.tags] += work_flop(OpCall.of(graph, node))
    if not done[True]:
        return []
    share = _percent(done[True] / sum(done.values()))
    return [
        f"micro-batches: terms of the loss have different divisors, so the backward phase that "
        f"they share is repeated, which is {share} of the arithmetic",
        "  one micro-batch, or a mean of the losses of micro-batches, avoids this",
    ]


def table_lines(graph: LogicalGraph) -> list[str]:
    """Return which large tables a step updates in the rows that it looks up, and which whole."""
    lines = []
    for node in graph.nodes:
        if node.op == "sbp.row_update":
            rows, table = graph.tensor(node.inputs()[0]).shape[0], graph.tensor(node.outputs[0])
            name = node.name.removesuffix(".update.rows")
            lines.append(
                f"table {name}: a step updates the rows that it looks up, at most {rows:,} of "
                f"{table.shape[0]:,}"
            )
    whole = whole_tables(graph).items()
    return lines + [f"table {name}: a step updates every row: {why}" for name, why in whole]


def _uneven_samples(graph: LogicalGraph, stage: Placement) -> list[str]:
    """Return a line if a micro-batch does not divide by the first axis, usually of samples."""
    samples, ranks = samples_of_step(graph) // graph.num_micro_batches, stage.mesh_shape[0]
    if samples % ranks == 0:
        return []
    batches = graph.num_micro_batches
    times = f" times the {batches} micro-batches" if batches > 1 else ""
    return [
        f"  {format_count(samples, 'sample')} of a micro-batch cannot be shared evenly by the "
        f"{ranks} ranks of mesh axis {stage.axes[0]!r}; take a batch size that is a multiple of "
        f"{ranks}{times}"
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def period_lines(checked: CheckReport) -> list[str]:
    """Return the shortest period of steps, and the first waits of the cycle that limits it."""
    cycle = checked.critical_cycle
    # A cycle of one wait is an actor that is never idle; a longer one lists who waits for whom.
    waits = f", by a critical cycle of {len(cycle)} waits" if len(cycle) > 1 else ""
    lines = [
        f"period: a step every {format_seconds(checked.period_s)} if they follow without a pause"
        f"{waits}",
        *(f"  {line}" for line in cycle[:_MOST_WAITS]),
    ]
    if len(cycle) > _MOST_WAITS:
        lines.append(f"  and {len(cycle) - _MOST_WAITS} more, back to the first")
    return lines


def summary(
    plan: PhysicalPlan,
    graph: LogicalGraph,
    strategy: Strategy,
    rows: Sequence[ModuleRow],
    num_steps: Mapping[StepKind, int],
    checked: CheckReport,
    step_s: float,
    speed: str = "",
) -> list[str]:
    """Return the lines under the table: pipeline, arithmetic, bytes sent, time, explanation.

    The explanation is `explanation` of the strategy's report: a list of lines.

    Args:
        plan: The checked plan.
        graph: The step.
        strategy: The strategy from which it was compiled.
        rows: The rows of the table.
        num_steps: Boxing steps of each kind between ranks, before small tensors are merged.
        checked: The result of the check of the plan.
        step_s: The predicted time of a step, in seconds.
        speed: The corresponding speed, see `speed_line`; may be empty.
    """
    return [
        f"planner {strategy.planner}: {format_count(len(plan.ranks), 'rank')}, "
        f"{format_count(plan.num_micro_batches, 'micro-batch', 'es')}",
        f"parameters of the model: {num_parameters(graph):,}",
        *pipeline_lines(plan, strategy, rows, step_s),
        *arithmetic_lines(graph, strategy),
        *repeated_lines(graph),
        *table_lines(graph),
        *_boxing_lines(plan, num_steps),
        "checked: a replay of the step proves that it cannot deadlock and that buffers are bounded",
        f"predicted time of a step: {format_seconds(step_s)}",
        *([f"  {speed}"] if speed else []),
        *period_lines(checked),
        *strategy.report.get("explanation", ()),
    ]


def _boxing_lines(plan: PhysicalPlan, num_steps: Mapping[StepKind, int]) -> list[str]:
    """Return the bytes that a step sends, and its collectives and transfers, without commit."""
    firings = {
        actor.step: actor.num_firings(plan.repetitions)
        for part in plan.distinct
        for actor in part.actors
        if isinstance(actor, BoxingActor) and actor.name != COMMIT
    }
    sent: Counter[StepKind] = Counter()
    for index, count in firings.items():
        sent[plan.steps[index].kind] += count * (plan.steps[index].size_bytes > 0)
    if not +sent:
        but = ", except the commit of the step" if plan.boxing_bytes else ""
        return [f"boxing: nothing is sent between ranks{but}"]
    texts, is_merged = [], False
    for kind in sorted(+sent):
        asked = max(num_steps.get(kind, 0), sent[kind])
        is_merged |= asked > sent[kind]
        texts.append(
            format_count(asked, kind.value)
            + (f" (sent as {sent[kind]})" if asked > sent[kind] else "")
        )
    together = "; small tensors are sent together" if is_merged else ""
    count, total = len(plan.ranks), plan.boxing_bytes
    return [
        f"boxing in a step: a rank sends {format_bytes(total / count)}, "
        f"the {count} ranks together {format_bytes(total)}",
        f"  {', '.join(texts)}{together}",
    ]
