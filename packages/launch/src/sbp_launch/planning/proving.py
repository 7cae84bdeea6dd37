"""The proof of a planned step, for both doors: by every process, before a step is taken.

Each process proves what it has planned, as it plans by itself. What is drawn follows from the
graphs, not from time or rank, so all of them come to the same, and nobody waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sbp_core.graph import LogicalGraph
from sbp_launch.planning.flow import Planned, prepare
from sbp_torch.graph_capture import flatten_batch, rebuild_batch
from sbp_torch.proof import PlannedStep, prove

#: Micro-batches of a step on few samples, and samples of each.
_FEW = (2, 2)


def add_proof(
    planned: Planned,
    captured: LogicalGraph,
    batch: Any,
    states: Callable[[], Mapping[str, Tensor]],
    capture: Callable[[Any], LogicalGraph],
) -> Planned:
    """Return a plan with what is proved of its graph, unless `compile.prove` says no.

    Args:
        planned: The plan.
        captured: The step as it was captured, in the parts that its settings say.
        batch: An example of what was captured.
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
        return PlannedStep(before=before, after=after, example=parts)

    step = PlannedStep(before=captured, after=planned.graph, example=flatten_batch(batch))
    found = prove(step, states=states, small=small, budget_s=config.prove_s)
    return replace(planned, proof=found)
