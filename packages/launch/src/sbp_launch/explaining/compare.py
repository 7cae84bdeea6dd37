"""Two plans of one model side by side: what they cost, and which modules are cut otherwise.

                     this plan   runs/other   change
    predicted step   19.8 ms     36.4 ms      +84%
    ...
    blocks.* x4  mlp.up   parameters (B, B) -> (B, S(0))   output (S(0), B) -> (S(0), S(2))

Meshes, stages and micro-batches may differ; SBPs of plans with other axes are texts, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from sbp_core.boxing import StepKind
from sbp_core.graph import graph_hash
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.columns import change_text, columns
from sbp_launch.explaining.figures import Figures, figures_of, memory_kinds
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.rows import ModuleRow
from sbp_launch.planning.table import groups_of

_ARROW = " -> "


def compare_lines(this: Planned, other: Planned, name: str) -> Iterator[str]:
    """Yield the comparison of a plan with another one.

    Args:
        this: The plan.
        other: The other one, of the same model.
        name: What the other one is called.
    """
    yield f"this plan: {plan_text(this.strategy)}"
    yield f"{name}: {plan_text(other.strategy)}"
    if other.strategy.graph_hash != graph_hash(other.graph):
        yield f"{name} was made for other sizes or settings; both are priced for the step of now"
    yield from columns([["", "this plan", _shortened(name), "change"], *figure_rows(this, other)])
    said, *lines = changed_rows(this, other, name)
    yield said[0]
    yield from columns([[f"  {head}", what, text] for head, what, text in lines], left=2)


def changed_rows(this: Planned, other: Planned, name: str) -> Iterator[list[str]]:
    """Yield how many modules are cut otherwise, then of each its name, what of it, and how.

    Args:
        this: The plan.
        other: The other one.
        name: What the other one is called.
    """
    changed, num_modules = changes(this.module_rows, other.module_rows)
    if not changed:
        yield [f"all {num_modules} modules are cut alike"]
        return
    yield [f"{len(changed)} of {num_modules} modules are cut otherwise (this plan{_ARROW}{name}):"]
    for group in groups_of(changed):
        for row in group.rows:
            head = ".".join(filter(None, (group.name.partition(" ")[0], row.module))) or "(root)"
            head += f" x{group.count}" if group.count > 1 else ""
            for what, text in (*row.parameters, ("output", row.output)):
                if text:
                    yield [head, what, text]
                    head = ""


def plan_text(strategy: Strategy) -> str:
    """Return what a strategy is, in a line: planner, mesh, stages, micro-batches."""
    first = strategy.stages[0]
    axes = " x ".join(
        f"{axis} {size}" for axis, size in zip(first.axes, first.mesh_shape, strict=True)
    )
    stages = f"{len(strategy.stages)} stages of " if len(strategy.stages) > 1 else ""
    batches = strategy.num_micro_batches
    return (
        f"planner {strategy.planner}, {len(strategy.ranks)} rank"
        f"{'s' * (len(strategy.ranks) > 1)}, {stages}{axes}, "
        f"{batches} micro-batch{'es' * (batches > 1)}"
    )


def figure_rows(this: Planned, other: Planned) -> Iterator[list[str]]:
    """Yield the rows of figures, those that are zero in both left out."""
    before, after = figures_of(this), figures_of(other)

    def row(
        name: str, value: Callable[[Figures], float], text: Callable[[float], str]
    ) -> list[str]:
        old, new = value(before), value(after)
        return [name, text(old), text(new), change_text(old, new)]

    yield row("predicted step", lambda one: one.step_s, format_seconds)
    yield row("  a rank computes", lambda one: one.computing_s, format_seconds)
    yield row("  a rank boxes", lambda one: one.boxing_s, format_seconds)
    yield row("a rank sends", lambda one: one.sent_bytes / one.num_ranks, format_bytes)
    kinds = [kind for kind in StepKind if before.calls_of(kind) or after.calls_of(kind)]
    for kind in kinds:
        yield row(f"  in {kind.value}s", partial(_sent_by, kind), format_bytes)
    for kind in kinds:
        yield row(f"number of {kind.value}s", partial(_calls_of, kind), _whole)
    if before.fullest is None or after.fullest is None:
        return
    yield row("memory of the fullest rank", _peak, format_bytes)
    yield from _memory_rows(memory_kinds(before.fullest), memory_kinds(after.fullest))


def _memory_rows(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[list[str]]:
    for name in dict.fromkeys((*before, *after)):
        old, new = before.get(name, 0), after.get(name, 0)
        yield [f"  {name}", format_bytes(old), format_bytes(new), change_text(old, new)]


def _sent_by(kind: StepKind, figures: Figures) -> float:
    return figures.sent_by(kind) / figures.num_ranks


def _calls_of(kind: StepKind, figures: Figures) -> float:
    return figures.calls_of(kind)


def _peak(figures: Figures) -> float:
    return figures.fullest.peak if figures.fullest is not None else 0


def _whole(number: float) -> str:
    return f"{number:.0f}"


def changes(this: Sequence[ModuleRow], other: Sequence[ModuleRow]) -> tuple[list[ModuleRow], int]:
    """Return the modules that are cut otherwise, as rows of texts `before -> after`, and how many.

    Args:
        this: The rows of a plan; the result is in their order.
        other: Those of another plan.

    Returns:
        The rows that differ, and the number of all modules. Moves are left out.
    """
    then = {row.module: row for row in other}
    found = []
    modules = dict.fromkeys((*(row.module for row in this), *then))
    now = {row.module: row for row in this}
    for module in modules:
        old, new = now.get(module), then.get(module)
        if old is None or new is None:
            # Such as a module of views, whose row tells of nothing but boxing.
            continue
        parameters = _parameter_changes(old, new)
        output = _changed(old.output, new.output)
        stage = _changed(f"stage {old.stage}", f"stage {new.stage}")
        if parameters or output or stage:
            parts = (*((("stage", stage),) if stage else ()), *parameters)
            found.append(replace(old, stage=0, parameters=parts, output=output, moves=()))
    return found, len(modules)


def _parameter_changes(old: ModuleRow, new: ModuleRow) -> tuple[tuple[str, str], ...]:
    """Return (names, change) of the parameters that differ, those that change alike together."""
    after = dict(new.parameters)
    found: dict[str, list[str]] = {}
    for name, sbp in old.parameters:
        if text := _changed(sbp, after.get(name, "-")):
            found.setdefault(text, []).append(name)
    return tuple((", ".join(names), text) for text, names in found.items())


def _changed(old: str, new: str) -> str:
    return "" if old == new else f"{old or '-'}{_ARROW}{new or '-'}"


def _shortened(name: str) -> str:
    return name if len(name) <= 24 else f"...{name[-21:]}"
