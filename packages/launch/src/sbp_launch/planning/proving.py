"""Prove, before training, that a step prepared for planning computes the same as the captured one.

Each process proves its own plan. The random values depend on the graphs, not on time or rank, so
all processes get the same result, and none waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sbp_aten import LossMeaning
from sbp_aten.passes import defer_batch_norm
from sbp_core.graph import LogicalGraph
from sbp_launch.planning.flow import Planned, PlanSettings, prepare
from sbp_torch.graph_capture import flatten_batch, rebuild_batch
from sbp_torch.proof import PlannedStep, prove

#: For a step on few samples: the number of micro-batches, and samples of each.
_FEW = (2, 2)


def add_proof(
    planned: Planned,
    captured: LogicalGraph,
    batch: Any,
    states: Callable[[], Mapping[str, Tensor]],
    capture: Callable[[Any], LogicalGraph],
) -> Planned:
    """Return a plan together with the result of its proof, unless `compile.prove` is false.

    Args:
        planned: The plan.
        captured: The captured step, cut into the parts of its settings.
        batch: An example of the batch of the captured step.
        states: Returns values of the states.
        capture: Captures the step on another number of samples.

    Raises:
        GraphError: the planned step computes something else; see `sbp_torch.proof.proofs`.
    """
    config, settings = planned.settings.compile, planned.settings
    if not config.prove:
        return planned

    def small() -> PlannedStep:
        count, each = _FEW
        parts = {
            name: value[: count * each] if value.dim() else value
            for name, value in flatten_batch(batch).items()
        }
        before = capture(rebuild_batch(batch, parts))
        after = prepare(before, replace(settings, micro_batches=count))
        before = _meant(before, replace(settings, micro_batches=count))
        return PlannedStep(before=before, after=after, example=parts)

    step = PlannedStep(
        before=_meant(captured, settings), after=planned.graph, example=flatten_batch(batch)
    )
    found = prove(step, states=states, small=small, budget_s=config.prove_s)
    return replace(planned, proof=found)


def _meant(captured: LogicalGraph, settings: PlanSettings) -> LogicalGraph:
    """Return a captured step with the change of meaning that its settings ask for."""
    if not settings.compile.passes.deferred_batch_norm:
        return captured
    several = settings.loss is LossMeaning.EACH_MICRO_BATCH
    count = settings.micro_batches_per_update if several else settings.micro_batches
    return defer_batch_norm(captured, count, cut=settings.loss is LossMeaning.WHOLE_BATCH)
