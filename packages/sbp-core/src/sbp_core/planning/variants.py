"""Yield variants of a training step that need less memory, in the order in which to try them.

Planners such as `auto` and `galvatron` also plan these, because device memory may be short.

    1. activations recomputed, within ever smaller budgets    more arithmetic, the same boxing
    2. operators of the largest parameters in slices          the same arithmetic, more messages
    3. more and smaller micro-batches                         more of everything that is small

For each number of micro-batches, 1 is tried, then 2 with the smallest budget of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from sbp_core.errors import SbpError
from sbp_core.graph import InputKind, LogicalGraph, graph_hash
from sbp_core.graph_variant import GraphFamily, GraphVariant, OperatorSlices
from sbp_core.passes import least_recompute_budget, saved_bytes
from sbp_core.plan_request import PlanRequest
from sbp_core.sbp import P
from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes

#: The budgets that are tried, as shares of the saved bytes.
_BUDGETS = (0.5, 0.25)

#: Parameters with at least this share of all bytes are sliced, into this many slices.
_LARGE_SHARE, _NUM_SLICES = 0.1, 4

#: Most sliced operators that a description names one by one.
_MAX_NAMED = 2


def smaller_variants(family: GraphFamily) -> Iterator[GraphVariant]:
    """Yield the variants of a step that need less memory than the requested one.

    Args:
        family: The available variants.
    """
    first = family.variant
    counts = [n for n in family.micro_batches if n >= first.num_micro_batches]
    for count in counts or [first.num_micro_batches]:
        variant = replace(first, num_micro_batches=count)
        if count > first.num_micro_batches:
            yield variant
        graph = family.graph(variant)
        if family.may_recompute:
            for budget in recompute_budgets(graph):
                yield replace(variant, recompute_bytes=budget)
            variant = replace(variant, recompute_bytes=float(least_recompute_budget(graph)))
        if family.may_slice and (slices := _slices(graph)):
            yield replace(variant, slices=slices)


def requests_of(
    request: PlanRequest, variants: Callable[[GraphFamily, int], Iterable[GraphVariant]]
) -> Iterator[tuple[PlanRequest, GraphVariant | None]]:
    """Yield the request of each variant that can be made; only `request` if it has no family.

    Args:
        request: What is planned.
        variants: Returns the variants with a number of micro-batches, such as `variants_of`.

    Raises:
        SbpError: no variant can be made; the error is that of the first one.
    """
    family, problem, is_any = request.family, None, False
    if family is None:
        yield request, None
        return
    for count in family.micro_batches:
        try:
            made = list(variants(family, count))
        except SbpError as error:
            problem = problem or error
            continue
        for variant in made:
            try:
                asked = request.of(variant)
            except SbpError as error:  # such as a budget of activations that is too small
                problem = problem or error
                continue
            is_any = True
            yield asked, variant
    if problem is not None and not is_any:
        raise problem


def variants_of(family: GraphFamily, count: int) -> Iterator[GraphVariant]:
    """Yield the variants of a step with a number of micro-batches; some may have no graph.

    Args:
        family: The available variants.
        count: The number of micro-batches.

    Raises:
        SbpError: there is no variant with that number.
    """
    for form in forms_of(family, count):
        yield form
        yield from leaner_forms(family, form)


def leaner_forms(family: GraphFamily, form: GraphVariant) -> Iterator[GraphVariant]:
    """Yield a form with activations recomputed within ever smaller budgets, and in slices.

    These need less memory than the form, and no less time: they run the same operators, some of
    them twice or in parts.

    Args:
        family: The available variants.
        form: A variant that `forms_of` returns.

    Raises:
        SbpError: there is no such form.
    """
    graph = family.graph(form)
    budgets = recompute_budgets(graph) if family.may_recompute else []
    for budget in budgets:
        yield replace(form, recompute_bytes=budget)
    if family.may_slice and (slices := _slices(graph)):
        for least in (None, *budgets[-1:]):
            yield replace(form, recompute_bytes=least, slices=slices)


def forms_of(family: GraphFamily, count: int) -> list[GraphVariant]:
    """Return the forms of a step: with whole softmaxes, if that is another graph, and as requested.

    Args:
        family: The available variants.
        count: Number of micro-batches.

    Raises:
        SbpError: there is no variant with that number.
    """
    variant = replace(family.variant, num_micro_batches=count)
    whole, graph = replace(variant, splits_classes=False), family.graph(variant)
    if not variant.splits_classes:
        return [variant]
    try:
        is_other = graph_hash(family.graph(whole)) != graph_hash(graph)
    except SbpError:
        is_other = False
    return [whole, variant] if is_other else [variant]


def _slices(graph: LogicalGraph) -> tuple[OperatorSlices, ...]:
    sizes = {
        entry.name: graph.tensor(entry.name).size_bytes
        for entry in graph.inputs
        if entry.kind is InputKind.PARAMETER
    }
    total = sum(sizes.values())
    return tuple(
        OperatorSlices(pattern=name, count=_NUM_SLICES)
        for name, size in sizes.items()
        if size >= _LARGE_SHARE * total
        and len(graph.tensor(name).shape) == 2
        and all(extent % _NUM_SLICES == 0 for extent in graph.tensor(name).shape)
    )


def recompute_budgets(graph: LogicalGraph) -> list[float]:
    """Return budgets of activations below what a step saves, the largest first, in bytes.

    Args:
        graph: The step without a budget.
    """
    saved, least = saved_bytes(graph), least_recompute_budget(graph)
    budgets = (*(share * saved for share in _BUDGETS), least)
    return [float(budget) for budget in budgets if least <= budget < saved]


def splits_classes(strategy: Strategy) -> bool:
    """Whether ranks hold partial maxima, as for logits with split classes."""
    made = (sbp for one in strategy.nodes.values() for sbp in one.signature.outputs)
    return any(part == P("max") for sbp in made for part in sbp)


def variant_words(variant: GraphVariant) -> str:
    """Return the differences of a variant: `4 micro-batches, activations within 2.1 MB`."""
    count = variant.num_micro_batches
    parts = [f"{count} micro-batch{'es' * (count > 1)}"]
    if variant.recompute_bytes is not None:
        parts.append(f"activations within {format_bytes(variant.recompute_bytes)}")
    if len(variant.slices) > _MAX_NAMED:
        parts.append(f"{len(variant.slices)} operators in slices")
    else:
        parts += [f"{one.pattern} in {one.count} by {one.along}" for one in variant.slices]
    return ", ".join(parts)
