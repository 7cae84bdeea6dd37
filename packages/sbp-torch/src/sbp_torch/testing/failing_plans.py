"""Plans that fail on purpose, for tests of runtimes: they call an operator that raises an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sbp_core.compile import Compute, Instruction, PhysicalPlan
from sbp_core.graph import InputKind, Phase, Ref

__all__ = ["REFUSAL", "plan_failing_late", "plan_with", "refuse_large", "too_large"]

#: Error message of `refuse_large`.
REFUSAL = "the input is too large"

#: `refuse_large` raises an error for larger absolute values.
_TOO_LARGE = 1e6


@cache
def _refusing_operator() -> Callable[[Tensor], Tensor]:
    """Register the operator; the cache keeps it alive."""

    @torch.library.custom_op("sbp_testing::refuse_large", mutates_args=())
    def refuse_large(value: Tensor) -> Tensor:
        if not bool((value.abs() < _TOO_LARGE).all()):
            raise ArithmeticError(REFUSAL)
        return value.new_zeros(())

    return refuse_large


def refuse_large() -> str:
    """Return the name of an operator that fails on inputs above a million, infinite or NaN."""
    _refusing_operator()
    return "sbp_testing.refuse_large.default"


def plan_with(plan: PhysicalPlan, rank: int, op: str) -> tuple[PhysicalPlan, str]:
    """Let one rank call one more operator, in the middle of the step.

    Args:
        plan: The plan of a training step.
        rank: The rank.
        op: The operator. It takes a tensor; its result is not used.

    Returns:
        The plan, and the actor that calls the operator: the rank's first backward segment.
    """
    part = plan.by_rank[rank]
    chosen = next(
        actor
        for actor in part.actors
        if isinstance(actor, Compute) and actor.phase is Phase.BACKWARD and actor.inputs
    )
    key = next(
        ref.name
        for entry in chosen.instructions
        for ref in entry.args
        if isinstance(ref, Ref) and ref.name in chosen.inputs
    )
    entry = Instruction(op=op, args=(Ref(key),), outputs=("unused",), node="conformance")
    actor = replace(chosen, instructions=(entry, *chosen.instructions))
    actors = tuple(actor if other is chosen else other for other in part.actors)
    changed = replace(part, actors=actors)
    ranks = tuple(changed if other is part else other for other in plan.ranks)
    return replace(plan, ranks=ranks), chosen.name


def plan_failing_late(plan: PhysicalPlan, rank: int, op: str) -> PhysicalPlan:
    """Let one rank call an operator with an updated parameter, at the end of the step.

    Args:
        plan: The plan of a training step, with one thread on the rank.
        rank: The rank.
        op: The operator, as for `plan_with`.
    """
    part = plan.by_rank[rank]
    parameters = {slot.name for slot in part.slots if slot.kind == InputKind.PARAMETER}
    writer, state = next((a, s) for a in part.actors for s in a.in_place if s in parameters)
    late = Compute(
        name="late",
        stage=writer.stage,
        phase=writer.phase,
        rate=writer.rate,
        thread=writer.thread,
        reads=(state,),
        instructions=(Instruction(op=op, args=(Ref(state),), outputs=("unused",), node="late"),),
    )
    orders = {**part.orders, writer.thread: (*part.orders[writer.thread], ("late", 0))}
    changed = replace(part, actors=(*part.actors, late), orders=orders)
    return replace(plan, ranks=tuple(changed if p is part else p for p in plan.ranks))


def too_large(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch with infinite features, on which `refuse_large` fails."""
    return {**batch, "features": torch.full_like(batch["features"], torch.inf)}
