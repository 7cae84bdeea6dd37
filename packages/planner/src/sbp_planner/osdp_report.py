"""Report the choice of the planner `osdp`: sharded parameters, other variants, batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sbp_core.strategy import Strategy
from sbp_core.units import format_bytes, format_seconds
from sbp_planner.osdp_variants import TriedVariant, VariantSearch
from sbp_planner.storage_search import Choice, StorageSearch

#: How many variants are listed for people.
_NUM_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The result for one batch size.

    Args:
        batch_size: Samples of a step.
        step_s: Predicted time of a step, in seconds, of the fastest plan that fits; of the leanest
            one if none does.
        memory_bytes: Memory of the fullest rank.
        fits: Whether that is within the limit.
        num_sharded: Number of sharded parameters.
        variant: How the variant of the step differs from others, in words.
        problem: Why there is no plan; empty if there is one.
    """

    batch_size: int
    step_s: float = 0.0
    memory_bytes: int = 0
    fits: bool = False
    num_sharded: int = 0
    variant: str = ""
    problem: str = ""

    @property
    def samples_per_s(self) -> float:
        """Predicted samples of all ranks per second."""
        return self.batch_size / self.step_s if self.step_s else 0.0

    def __str__(self) -> str:
        if self.problem:
            return f"{self.batch_size} samples: {self.problem}"
        size = format_bytes(self.memory_bytes)
        if not self.fits:
            return f"{self.batch_size} samples: no plan fits, the least needs {size}"
        return (
            f"{self.batch_size} samples: {self.samples_per_s:.4g} samples/s, "
            f"{format_seconds(self.step_s)} a step, {size}, {self.num_sharded} sharded, "
            f"{self.variant}"
        )


def storage_report(search: StorageSearch, best: Choice, variants: VariantSearch) -> dict[str, Any]:
    """Return the choice and its alternatives, as plain values."""
    return {
        "limit_bytes": search.limit_bytes,
        "binds": _binding(search, best),
        "unlimited_step_s": min(one.unlimited_s for one in variants.tried),
        "memory_is_exact": search.is_exact,
        "num_compiled": sum(one.search.num_compiled for one in variants.tried),
        "modes": {
            name: "ZDP" if sharded else "DP"
            for name, sharded in zip(search.names, best, strict=True)
        },
        **{
            name: {
                "plan_step_s": search.step_s(choice),
                "plan_memory_bytes_per_rank": search.memory(choice),
                "num_sharded": sum(choice),
                "fits": search.memory(choice) <= search.limit_bytes,
            }
            for name, choice in (
                ("chosen", best),
                ("all_dp", search.all_replicated),
                ("all_zdp", search.all_sharded),
            )
        },
        "variants": [
            {
                "variant": one.words,
                "unlimited_step_s": one.unlimited_s,
                "plan_step_s": one.step_s if one.fits else None,
                "plan_memory_bytes_per_rank": one.search.memory(one.choice),
            }
            for one in variants.tried
            if one.is_followed and one.variant is not None
        ],
        "cells": [
            {
                "ranks": list(cell.ranks),
                "plan_memory_bytes_per_rank": search.cell_memory(best, cell),
                "num_sharded": sum(best[index] for index in cell.parameters),
            }
            for cell in search.cells
        ],
    }


def memory_gain(planned: Strategy) -> float:
    """Return the share of the step's time that its fastest choice saves if memory has no limit."""
    found = planned.report["osdp"]
    chosen_s = found["chosen"]["plan_step_s"]
    return 1 - float(found["unlimited_step_s"] / chosen_s) if chosen_s else 0.0


def batch_report(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return the results of all batch sizes, as plain values; empty if none were compared."""
    if not batches:
        return {}
    rows = [asdict(batch) | {"samples_per_s": batch.samples_per_s} for batch in batches]
    return {"batches": rows, "best_batch_size": best_batch(batches).batch_size}


def best_batch(batches: Sequence[Batch]) -> Batch:
    """Return the batch of most samples per second that fits; of equally fast ones the smallest."""
    fitting = [batch for batch in batches if batch.fits]
    return max(fitting, key=lambda batch: (batch.samples_per_s, -batch.batch_size))


def explanation(
    search: StorageSearch, best: Choice, variants: VariantSearch, batches: Sequence[Batch]
) -> list[str]:
    """Return the choice and the reasons, as lines for people."""
    num = len(best)
    how = "" if search.is_exact else " (memory is an upper bound: layouts of results are not known)"
    lines = [
        f"osdp: {sum(best)} of {num} parameters sharded, under a limit of "
        f"{format_bytes(search.limit_bytes)} a rank{how}"
    ]
    for name, choice in (
        ("all replicated", search.all_replicated),
        ("chosen", best),
        ("all sharded", search.all_sharded),
    ):
        seconds, size = search.step_s(choice), search.memory(choice)
        lines.append(f"  {name}: {format_seconds(seconds)} a step, {format_bytes(size)}")
    if len(search.cells) > 1:
        for cell in search.cells:
            sharded = sum(best[index] for index in cell.parameters)
            lines.append(
                f"  ranks {', '.join(map(str, cell.ranks))}: {sharded} of "
                f"{len(cell.parameters)} sharded, {format_bytes(search.cell_memory(best, cell))}"
            )
    return [*lines, *_variant_lines(search, variants), *_batch_lines(batches)]


def _variant_lines(search: StorageSearch, variants: VariantSearch) -> list[str]:
    tried = sorted((one for one in variants.tried if one.is_followed), key=TriedVariant.rank)
    lines = []
    if len(tried) > 1:
        chosen = next(one for one in tried if one.search is search)
        lines.append(f"osdp: of {len(tried)} variants of the step, the fastest that fits is")
        lines += [_variant_line(one) for one in [chosen, *(o for o in tried if o is not chosen)]]
        if len(lines) > _NUM_SHOWN:
            lines = [*lines[:_NUM_SHOWN], f"  ... and {len(lines) - _NUM_SHOWN} others"]
    if variants.untried:
        lines.append("  other variants were not tried within planner.time_limit_s")
    return lines


def _variant_line(one: TriedVariant) -> str:
    size = format_bytes(one.search.memory(one.choice))
    told = f"{format_seconds(one.step_s)} a step, {size}" if one.fits else f"needs {size}"
    return f"  {one.words}: {told}"


def _batch_lines(batches: Sequence[Batch]) -> list[str]:
    if not batches:
        return []
    ordered = sorted(batches, key=lambda batch: batch.batch_size)
    lines = ["osdp: samples per second by trainer.batch_size", *(f"  {one}" for one in ordered)]
    best, own = best_batch(batches), batches[0]
    if best is own:
        return [*lines, f"  none of these is faster than trainer.batch_size={own.batch_size}"]
    share = best.samples_per_s / own.samples_per_s - 1
    return [
        *lines,
        f"  trainer.batch_size={best.batch_size} is {share:.0%} faster than {own.batch_size}, "
        "which this plan is for",
    ]


def _binding(search: StorageSearch, best: Choice) -> str:
    """Return the reason against another choice, such as memory."""
    replicated = search.all_replicated
    short = search.memory(replicated) - search.limit_bytes
    if short > 0:
        return f"memory: replicating everything needs {short:.0f} B more than the limit"
    if best == replicated:
        return "time: replicating everything is fastest, and fits"
    return "time: replicating everything fits, and sharding these is faster"
