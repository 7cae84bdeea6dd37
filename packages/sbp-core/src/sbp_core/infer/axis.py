"""Choose the shardings of all operators and stored tensors on one mesh axis, at least cost.

`infer.problem` poses the problem, `infer.minsum` solves it; `infer.solve` goes from axis to axis.
"""

from __future__ import annotations

from sbp_core.errors import PlanError
from sbp_core.infer.equal_layers import EqualLayers
from sbp_core.infer.greedy_start import start_greedily
from sbp_core.infer.minsum import minimise
from sbp_core.infer.pins import PINS, Pins
from sbp_core.infer.problem import FORBIDDEN_S, StepProblem
from sbp_core.infer.tables import CostTables
from sbp_core.infer.work import Decision, FixedDecisions, StepWork, replicated
from sbp_core.sbp import B

#: Values whose tables would be larger than this get a variable for their targets.
_MAX_DIRECT_ENTRIES = 20_000


def decide_axis(
    work: StepWork,
    decision: Decision,
    axis: int,
    pins: Pins,
    kept: FixedDecisions | None = None,
    *,
    layers: EqualLayers | None = None,
) -> bool:
    """Decide one mesh axis; return whether the choice is proved to be the best on that axis.

    On an axis of one rank all SBPs mean the same; B is written.

    Args:
        work: The step.
        decision: The decisions on the earlier axes; this axis is added.
        axis: The mesh axis.
        pins: The pins, which must hold.
        kept: Decisions of an earlier strategy that stay where pins allow; nothing if None.
        layers: The layers that are decided alike, on earlier axes, too; nothing if None.

    Raises:
        PlanError: the pins leave no combination that can be boxed.
    """
    if not work.has_ranks(axis):
        for node in work.nodes:
            part = replicated(work.calls[node.name])
            decision.nodes[node.name] = (*decision.nodes.get(node.name, ()), part)
        for entry in work.inputs:
            decision.storage[entry.name] = (*decision.storage.get(entry.name, ()), B)
        return True
    kept = kept or FixedDecisions()
    problem = StepProblem(work, decision, range(axis, axis + 1), pins, kept, layers=layers)
    start_greedily(problem)
    tables = CostTables(problem, max_entries=_MAX_DIRECT_ENTRIES)
    found = minimise(tables.sizes, tables.factors, tables.start)
    if found.cost >= FORBIDDEN_S:
        raise PlanError(
            f"no plan on mesh axis {work.axes[axis]!r} fulfils the pins",
            where=PINS,
            todo="remove a pin of this axis",
        )
    decided = problem.decided(found.values)
    decision.nodes, decision.storage = decided.nodes, decided.storage
    return found.exact
