"""Recomputation (activation checkpointing): recompute forward values instead of saving them.

Regions to recompute are given in three ways, which combine: modules by pattern, calls under
`torch.utils.checkpoint` in the user's model, or a budget, within which `budget` chooses. Operators
that draw from PyTorch's own random streams are never run twice; `sbp.random_*` operators are,
because they draw the same numbers again. States that the forward phase replaces, such as batch-norm
statistics, are replaced once: their recomputed values are unused.

Source: Chen, Xu, Zhang, Guestrin, "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from sbp_core.errors import ConfigError
from sbp_core.graph.ir import LogicalGraph, Node, Phase, block_of
from sbp_core.graph.primitives import AFTER
from sbp_core.graph.rewrite import rename_uses
from sbp_core.passes.budget import choose_regions, least_budget
from sbp_core.passes.options import RecomputeOptions
from sbp_core.passes.rematerialize import REMATERIALIZED, Region, rematerialize
from sbp_core.passes.saved_activations import (
    bases_of,
    call_flop,
    is_forward,
    made_bytes,
    saved_bytes,
)
from sbp_core.units import format_bytes, format_ranges

#: Tag of nodes that the user's model runs under `torch.utils.checkpoint`; followed by `:` and the
#: number of the call.
MARK = "recompute"


#: Operators that write statistics into their arguments although their schemas do not say so.
_UNDECLARED_MUTATION = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})


def recompute(graph: LogicalGraph, how: RecomputeOptions) -> LogicalGraph:
    """Recompute forward values where backward nodes use them, instead of saving them.

    before: h = mm(x, w); a = gelu(h); ...   dh = gelu_backward(da, h)
    after:  h = mm(x, w); a = gelu(h); ...   x.after = sbp.after(x, da)
            h.recomputed = mm(x.after, w); dh = gelu_backward(da, h.recomputed)

    Runs on a captured step, before the accumulation over micro-batches or after it.

    Raises:
        ConfigError: a pattern matches nothing, or no choice fits the budget.
    """
    _check_patterns(graph, how)

    def matched(node: Node) -> str:
        found = (_matching_module(pattern, node.module) for pattern in how.modules)
        return min(filter(None, found), key=len, default="")

    # A region for each call of an outermost module that a pattern matches, and for each call under
    # `torch.utils.checkpoint`.
    regions = [*_runs(graph, how, matched)]
    seen = {name for region in regions for name in region.members}

    def mark(node: Node) -> str:
        marks = [tag for tag in node.tags if tag.split(":")[0] == MARK]
        return max(marks, key=len, default="") if node.name not in seen else ""

    regions += _runs(graph, how, mark) if how.marked else ()
    graph = rematerialize(graph, regions)
    if how.memory_bytes is not None:
        fixed = _fixed(graph, how)
        fixed |= {name for region in regions for name in region.recomputable}
        chosen = choose_regions(graph, int(how.memory_bytes), fixed, how.longest_run)
        graph = rematerialize(graph, chosen)
    return graph


def least_recompute_budget(graph: LogicalGraph, how: RecomputeOptions | None = None) -> int:
    """Return the least `memory_bytes` with which `recompute` finds a choice.

    Args:
        graph: A training step; values that are already recomputed in it count as saved.
        how: The other settings; None takes the defaults.
    """
    how = how or RecomputeOptions()
    graph = _without_recomputation(graph)
    return least_budget(graph, _fixed(graph, how), how.longest_run)


def _fixed(graph: LogicalGraph, how: RecomputeOptions) -> set[str]:
    return {n.name for n in graph.nodes if is_forward(n) and not _is_recomputable(n, how)}


def _is_recomputable(node: Node, how: RecomputeOptions) -> bool:
    """Whether a node may be recomputed: it is deterministic, pure, and excluded by no pattern."""
    named = any(
        fnmatchcase(node.name, pattern) or _matching_module(pattern, node.module)
        for pattern in how.keep
    )
    return not named and "seeded" not in node.tags and node.kind not in _UNDECLARED_MUTATION


def _matching_module(pattern: str, module: str) -> str:
    """Return the outermost module around a node that a pattern matches; empty if there is none."""
    parts = module.split(".")
    around = (".".join(parts[: count + 1]) for count in range(len(parts)))
    return next((path for path in around if path and fnmatchcase(path, pattern)), "")


def _check_patterns(graph: LogicalGraph, how: RecomputeOptions) -> None:
    nodes = [node for node in graph.nodes if is_forward(node)]
    for pattern in (*how.modules, *how.keep):
        names_node = pattern in how.keep and any(fnmatchcase(n.name, pattern) for n in nodes)
        if not names_node and not any(_matching_module(pattern, node.module) for node in nodes):
            modules = sorted({node.module for node in nodes if node.module})
            raise ConfigError(
                f"the pattern {pattern!r} of the recomputation matches no module",
                accepted=", ".join(modules[:12]) + ", ..." * (len(modules) > 12),
                todo="name modules as model.named_modules() does",
            )


def _runs(
    graph: LogicalGraph, how: RecomputeOptions, key: Callable[[Node], str]
) -> Iterator[Region]:
    """Yield a region for each run of forward nodes with one key, except the empty key."""
    nodes = [node for node in graph.nodes if is_forward(node)]
    count = 0
    for name, run in groupby(nodes, key=key):
        members = list(run)
        if name:
            count += 1
            yield Region(
                name=f"{name}#{count}",
                members=frozenset(node.name for node in members),
                recomputable=frozenset(
                    node.name for node in members if _is_recomputable(node, how)
                ),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeReport:
    """The effect of a recomputation on one micro-batch, in whole logical tensors.

    Args:
        saved_before_bytes, saved_after_bytes: Activations saved from forward to backward.
        largest_recomputed_bytes: The most recomputed bytes alive at once.
        extra_flop: Work that is done twice.
        step_flop: Work of forward and backward before.
        modules: Modules with recomputed operators, and their numbers.
    """

    saved_before_bytes: int
    saved_after_bytes: int
    largest_recomputed_bytes: int
    extra_flop: float
    step_flop: float
    modules: Sequence[tuple[str, int]]

    def __str__(self) -> str:
        before, after = format_bytes(self.saved_before_bytes), format_bytes(self.saved_after_bytes)
        recomputed = format_bytes(self.largest_recomputed_bytes)
        share = self.extra_flop / self.step_flop if self.step_flop else 0.0
        named = ", ".join(_named(self.modules))
        return (
            f"keeps {after} instead of {before} of activations, makes up to {recomputed} again at "
            f"a time, {share:.1%} more work: {named}"
        )


def _named(modules: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Yield modules with their numbers of operators, with equal layers together.

    >>> list(_named([("blocks.1", 5), ("blocks.0", 5), ("head", 2)]))
    ['blocks.{0-1} (5 ops each)', 'head (2 ops)']
    """
    alike: dict[tuple[str, int], list[int]] = {}
    for module, count in modules:
        before, _, number = module.rpartition(".")
        if number.isdigit():
            alike.setdefault((before, count), []).append(int(number))
        else:
            alike[module or "(root)", count] = []
    for (name, count), numbers in alike.items():
        if len(numbers) > 1:
            yield f"{name}.{{{format_ranges(numbers)}}} ({count} ops each)"
        else:
            yield f"{name}{''.join(f'.{number}' for number in numbers)} ({count} ops)"


def recompute_report(graph: LogicalGraph) -> RecomputeReport:
    """Compare a graph with the graph before `recompute`."""
    before = _without_recomputation(graph)
    work = [n for n in before.nodes if is_forward(n) or n.phase is Phase.BACKWARD]
    copies = [n for n in graph.nodes if REMATERIALIZED in n.tags and n.op != AFTER]
    modules: dict[str, list[Node]] = {}
    for node in copies:
        modules.setdefault(block_of(node.module), []).append(node)
    return RecomputeReport(
        saved_before_bytes=saved_bytes(before),
        saved_after_bytes=saved_bytes(graph),
        largest_recomputed_bytes=_peak_recomputed_bytes(graph),
        extra_flop=sum(call_flop(graph, node) for node in copies),
        step_flop=sum(call_flop(before, node) for node in work if not node.is_host),
        modules=tuple((module, len(nodes)) for module, nodes in modules.items()),
    )


def _without_recomputation(graph: LogicalGraph) -> LogicalGraph:
    """Return the graph with every recomputed value replaced by the saved one.

    A recomputed forward value that only the backward phase uses no longer exists in the forward
    phase; its copy stays.
    """
    names: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        if REMATERIALIZED not in node.tags or (
            node.op != AFTER and node.forward not in graph.by_name
        ):
            kept.append(node)
        else:
            waits = node.op == AFTER
            saved = node.inputs()[:1] if waits else graph.by_name[node.forward].outputs
            names |= zip(node.outputs, saved, strict=True)
    return graph.with_nodes(tuple(rename_uses(node, names) for node in kept))


def _peak_recomputed_bytes(graph: LogicalGraph) -> int:
    """Return the most bytes of recomputed values alive at once, in graph order."""
    made = {
        node.name: made_bytes(graph, node) for node in graph.nodes if REMATERIALIZED in node.tags
    }
    base_of = bases_of(graph)
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in (*graph.tensor_inputs(node), *node.outputs):
            if graph.is_tensor(value):
                last[base_of(value)] = index
    freed: dict[int, int] = {}
    for value, index in last.items():
        producer = graph.producers.get(value)
        if producer is not None and producer.name in made:
            freed[index] = freed.get(index, 0) + graph.tensor(value).size_bytes
    alive = peak = 0
    for index, node in enumerate(graph.nodes):
        alive += made.get(node.name, 0)
        peak = max(peak, alive)
        alive -= freed.get(index, 0)
    return peak
