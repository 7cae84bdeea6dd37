"""Explain, in the error of the planner `osdp`, why no plan fits memory, and what would help.

The effect of a setting is estimated from the leanest plan. At its peak, it holds activations A and
a rest R, so the limit L leaves L - R for activations.

    compile.passes.recompute     a budget of N (L - R), because it counts activations of all N
                                 ranks, if the pass can keep to it
    trainer.micro_batches        k times as many leave about A / k, and more of R
    compile.passes.slices        slices of a parameter that is a large part of the memory
"""

from __future__ import annotations

from collections.abc import Iterator

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import MemoryLimitError
from sbp_core.graph import InputKind, LogicalGraph
from sbp_core.memory import MemoryKind, RankMemory
from sbp_core.passes import least_recompute_budget
from sbp_core.units import format_bytes

#: Kinds of memory below this share of the peak are not named.
_LEAST_SHARE = 0.01

#: Slicing is suggested for a parameter of at least this share of the peak.
_LARGE_SHARE = 0.1


def no_fit(
    plan: PhysicalPlan,
    graph: LogicalGraph,
    *,
    limit_bytes: float,
    least_bytes: int,
    num_sharded: int,
    memory: RankMemory | None,
    limit_key: str,
    has_slices: bool = False,
) -> MemoryLimitError:
    """Return the error for a limit that no choice keeps.

    Args:
        plan: The plan of the choice that needs least.
        graph: The step.
        limit_bytes: Memory of a rank.
        least_bytes: Memory that the choice needs.
        num_sharded: How many parameters it shards.
        memory: Memory of its fullest rank by kind; None if unknown.
        limit_key: The setting that is the limit.
        has_slices: Whether slices of operators were tried.
    """
    held = f"{num_sharded} parameters sharded" if num_sharded else "all parameters replicated"
    return MemoryLimitError(
        f"no choice fits {format_bytes(limit_bytes)} on a rank: the least, with {held}, needs "
        f"{format_bytes(least_bytes)}{_parts(memory)}",
        where=("planner osdp", limit_key),
        accepted=f"{limit_key} >= {least_bytes}",
        todo=";\n    ".join(_helps(plan, graph, limit_bytes, memory, has_slices)),
    )


def _parts(memory: RankMemory | None) -> str:
    """Return a list of the kinds of memory at the peak, the largest first."""
    if memory is None:
        return ""
    parts = sorted(memory.kinds.items(), key=lambda entry: -entry[1])
    named = [
        f"{format_bytes(n)} {kind.value}" for kind, n in parts if n > _LEAST_SHARE * memory.peak
    ]
    return f", at its peak {', '.join(named)}"


def _helps(
    plan: PhysicalPlan,
    graph: LogicalGraph,
    limit_bytes: float,
    memory: RankMemory | None,
    has_slices: bool,
) -> Iterator[str]:
    """Yield suggestions that would make a plan fit, with figures as far as they are known."""
    num_ranks = len(plan.ranks)
    if memory is not None:
        active = memory.kinds.get(MemoryKind.ACTIVATIONS, 0)
        room = limit_bytes - (memory.peak - active)
        if room <= 0:
            yield (
                f"all except activations needs {format_bytes(memory.peak - active)}, so neither "
                "compile.passes.recompute nor trainer.micro_batches is enough"
            )
        elif room < active:
            yield _recompute_help(graph, num_ranks, active, room)
        parts = _micro_batch_parts(graph, num_ranks, active, room)
        if parts:
            yield (
                f"trainer.micro_batches={parts * graph.num_micro_batches}: leaves about "
                f"{format_bytes(active / parts)} of activations, but parameters stay gathered and "
                "gradients are added up meanwhile"
            )
    yield f"more ranks than {num_ranks}: each holds a smaller part of states and activations"
    name, size = _largest_parameter(graph)
    if memory is not None and not has_slices and size > _LARGE_SHARE * memory.peak:
        yield (
            f"'compile.passes.slices={{{name}: {{count: 4}}}}': this parameter, "
            f"{format_bytes(size)}, is gathered slice by slice"
        )


def _recompute_help(graph: LogicalGraph, num_ranks: int, active: int, room: float) -> str:
    """Return advice on the budget that leaves so much room for activations, if there is one."""
    tenths = int(num_ranks * room / 1e5)  # of a megabyte, rounded down so that it is enough
    least = least_recompute_budget(graph)
    if 1e5 * tenths >= least:
        return (
            f"compile.passes.recompute.memory_bytes={tenths / 10:.1f}MB: keeps "
            f"{format_bytes(room)} of {format_bytes(active)} of activations and recomputes "
            "the rest, which takes time"
        )
    return (
        f"there is room for {format_bytes(room)} of activations; compile.passes.recompute alone "
        f"is not enough: with it at least {format_bytes(least / num_ranks)} are alive at once"
    )


def _micro_batch_parts(graph: LogicalGraph, num_ranks: int, active: int, room: float) -> int:
    """Return into how many parts a micro-batch would have to be split; 0 if no number helps."""
    batch = [e.name for e in graph.inputs if e.kind is InputKind.BATCH and graph.is_tensor(e.name)]
    shapes = [graph.tensor(name).shape for name in batch]
    size = min((shape[0] for shape in shapes if shape), default=1)
    parts = (n for n in range(2, size // num_ranks + 1) if size % n == 0)
    return next((n for n in parts if active / n <= room), 0)


def _largest_parameter(graph: LogicalGraph) -> tuple[str, int]:
    names = [entry.name for entry in graph.inputs if entry.kind is InputKind.PARAMETER]
    return max(((name, graph.tensor(name).size_bytes) for name in names), key=lambda one: one[1])
