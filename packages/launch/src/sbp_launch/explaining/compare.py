"""Compare two plans of one model in a table, for `sbp-plan compare=` and the page of a plan.

                     this plan   runs/other   change
    predicted step   19.8 ms     36.4 ms      +84%
    ...
    blocks.* x4  mlp.up   parameters (B, B) -> (B, S(0))   output (S(0), B) -> (S(0), S(2))

The plans may differ in mesh, stages and micro-batches: SBPs (layouts) are compared as text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from sbp_core.boxing import StepKind
from sbp_core.graph import graph_hash
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.console import change_text, columns
from sbp_launch.explaining.plan_figures import Figures, figures_of
from sbp_launch.explaining.table import groups_of
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.rows import ModuleRow


def change_row(
    name: str,
    before: Figures,
    after: Figures,
    value: Callable[[Figures], float],
    text: Callable[[float], str],
) -> list[str]:
    """Return the table row of a figure of two plans: its name, both values, the change."""
    old, new = value(before), value(after)
    return [name, text(old), text(new), change_text(old, new)]


_ARROW = " -> "


def compare_lines(this: Planned, other: Planned, name: str) -> Iterator[str]:
    """Yield the lines that compare a plan with another one."""
    yield f"this plan: {plan_text(this.strategy)}"
    yield f"{name}: {plan_text(other.strategy)}"
    if other.strategy.graph_hash != graph_hash(other.graph):
        yield f"{name} was made for other sizes or settings; both are priced for this step"
    short = name if len(name) <= 24 else f"...{name[-21:]}"
    yield from columns([["", "this plan", short, "change"], *figure_rows(this, other)])
    said, *lines = changed_rows(this, other, name)
    yield said[0]
    yield from columns([[f"  {head}", what, text] for head, what, text in lines], left=2)


def changed_rows(this: Planned, other: Planned, name: str) -> Iterator[list[str]]:
    """Yield a summary of the modules with other SBPs, then for each: name, tensor, change."""
    changed, num_modules = changes(this.module_rows, other.module_rows)
    if not changed:
        yield [f"all {num_modules} modules are split in the same way"]
        return
    yield [f"{len(changed)} of {num_modules} modules differ in splits (this plan{_ARROW}{name}):"]
    for group in groups_of(changed):
        for row in group.rows:
            head = ".".join(filter(None, (group.name.partition(" ")[0], row.module))) or "(root)"
            head += f" x{group.count}" if group.count > 1 else ""
            for what, text in (*row.parameters, ("output", row.output)):
                if text:
                    yield [head, what, text]
                    head = ""


def plan_text(strategy: Strategy) -> str:
    """Describe a strategy in a line: planner, mesh, stages, micro-batches."""
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
    """Yield the rows of figures; kinds of communication that neither plan has are left out."""
    before, after = figures_of(this), figures_of(other)
    row = partial(change_row, before=before, after=after)
    yield row("predicted step", value=lambda one: one.step_s, text=format_seconds)
    yield row("  a rank computes", value=lambda one: one.computing_s, text=format_seconds)
    yield row("  a rank boxes", value=lambda one: one.boxing_s, text=format_seconds)
    yield row("a rank sends", value=lambda one: one.sent_bytes / one.num_ranks, text=format_bytes)
    kinds = [kind for kind in StepKind if before.calls_of(kind) or after.calls_of(kind)]
    for kind in kinds:
        yield row(
            f"  in {kind.value}s", value=partial(Figures.sent_by, kind=kind), text=format_bytes
        )
    for kind in kinds:
        calls = partial(Figures.calls_of, kind=kind)
        yield row(f"number of {kind.value}s", value=calls, text="{:.0f}".format)
    if before.fullest is None or after.fullest is None:
        return
    name = "memory of the fullest rank"
    yield row(name, value=lambda one: one.fullest.peak if one.fullest else 0, text=format_bytes)
    for part in dict.fromkeys((*before.fullest.kinds, *after.fullest.kinds)):
        old, new = before.fullest.kinds.get(part, 0), after.fullest.kinds.get(part, 0)
        texts = format_bytes(old), format_bytes(new), change_text(old, new)
        yield [f"  {part.value}", *texts]


def changes(this: Sequence[ModuleRow], other: Sequence[ModuleRow]) -> tuple[list[ModuleRow], int]:
    """Return the modules whose SBPs differ, as rows of texts `before -> after`.

    Returns:
        The rows that differ, without their communication; and the number of all modules.
    """
    now, then = ({row.module: row for row in rows} for rows in (this, other))
    found, modules = [], dict.fromkeys((*now, *then))
    for module in modules:
        old, new = now.get(module), then.get(module)
        if old is None or new is None:
            # For example a module of views, whose row contains only communication.
            continue
        # Parameters with equal changes are put together.
        after, alike = dict(new.parameters), defaultdict[str, list[str]](list)
        for name, sbp in old.parameters:
            if text := _change_text(sbp, after.get(name, "-")):
                alike[text].append(name)
        parameters = tuple((", ".join(names), text) for text, names in alike.items())
        output = _change_text(old.output, new.output)
        stage = _change_text(f"stage {old.stage}", f"stage {new.stage}")
        if parameters or output or stage:
            parts = (*((("stage", stage),) if stage else ()), *parameters)
            found.append(replace(old, stage=0, parameters=parts, output=output, moves=()))
    return found, len(modules)


def _change_text(old: str, new: str) -> str:
    return "" if old == new else f"{old or '-'}{_ARROW}{new or '-'}"
