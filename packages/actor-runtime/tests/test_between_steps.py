"""What processes do between steps, on meshes of any kind, with several ranks in each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from actor_plans import SharedBackend
from torch import Tensor

from sbp_actor_runtime.between_steps import BetweenSteps
from sbp_core.compile.physical import PhysicalPlan, RankPlan, StateSlot
from sbp_core.graph import InputKind
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, local_shape
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime import StateStore

#: Two ranks hold what three others lack, and three what two lack; one is in both stages.
STAGES = (Placement([0, 1], ("data",)), Placement([2, 3, 4], ("data",)), Placement([4, 0], ("x",)))

#: Stage and nd-SBP of each state, all of shape (5, 2).
STATES = {
    "whole": (0, "B"),
    "rows": (0, "S(0)"),
    "columns": (1, "S(1)"),
    "whole there": (1, "B"),
    "on both": (2, "S(0)"),
}


def plan() -> PhysicalPlan:
    """Return a plan with no actors."""

    def slot(rank: int, name: str) -> StateSlot:
        stage, sbp = STATES[name][0], NdSbp.parse(STATES[name][1])
        at = STAGES[stage].coordinate(rank)
        return StateSlot(
            name=name,
            kind=InputKind.PARAMETER,
            shape=(5, 2),
            dtype="float32",
            stage=stage,
            sbp=sbp,
            local_shape=local_shape((5, 2), sbp, STAGES[stage].mesh_shape, at),
        )

    return PhysicalPlan(
        graph_hash="",
        planner="",
        num_micro_batches=1,
        ties={},
        stages=STAGES,
        steps=(),
        links=(),
        ranks=tuple(
            RankPlan(
                rank=rank,
                slots=tuple(slot(rank, name) for name in STATES if rank in STAGES[STATES[name][0]]),
                actors=(),
                registers=(),
                orders={},
            )
            for rank in range(5)
        ),
    )


@pytest.mark.parametrize("to", [None, 0, 3, 4])
def test_every_state_arrives_whole_wherever_it_is_to_go(to: int | None) -> None:
    states = {name: torch.rand(5, 2) for name in STATES}
    whole, processes = LocalBackend(), []
    for ranks in ([0, 2], [1, 3, 4]):
        store, backend = StateStore(plan(), ranks), SharedBackend(whole, ranks)
        store.load(states)
        backend.open(range(5))
        processes.append(BetweenSteps(plan(), store, backend, deadline_s=10.0))

    def gather_all(process: BetweenSteps) -> dict[str, Tensor | None]:
        return {name: process.gather(name, to) for name in STATES}

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(gather_all, processes))
    whole.close()

    for process, gathered in zip(processes, found, strict=True):
        gets = to is None or to in process.store.values
        for name, value in gathered.items():
            assert (value is not None) == gets
            assert value is None or torch.equal(value, states[name]), name
