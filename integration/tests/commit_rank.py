"""One rank of a training run whose rank 1 fails in its third step: prints what its session says.

    commit_rank.py BACKEND raise|kill forward|update ...

For each place a session of its own; a rank that is killed prints nothing. The plan is that of two
data parallel ranks, with an operator in rank 1 that fails there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core import Cluster, Placement, PlanRequest, compile_plan
from sbp_core.compile import Compute, Instruction, PhysicalPlan
from sbp_core.errors import SbpError
from sbp_core.graph import Phase, Ref
from sbp_core.plugins import discover
from sbp_core.runtime import Session
from sbp_torch.graph_capture import capture, initial_states

#: The step in which rank 1 fails, from 0.
BAD_STEP = 2

#: Seconds to learn that another rank has failed.
_NEWS_S = 10.0


@torch.library.custom_op("commit_rank::fail", mutates_args=())
def fail(value: Tensor, how: str) -> Tensor:
    """Fail in the bad step; each step calls this once on rank 1."""
    fail.calls += 1
    if fail.calls == BAD_STEP + 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("it fails here")
    return value.new_zeros(())


def failing(plan: PhysicalPlan, place: str, how: str) -> PhysicalPlan:
    """Return the plan with the operator at the end of a segment of rank 1."""
    part = plan.by_rank[1]
    actor = next(
        a
        for a in part.actors
        if isinstance(a, Compute)
        and (bool(a.in_place) if place == "update" else a.phase is Phase.FORWARD)
    )
    taken = actor.in_place[0] if place == "update" else actor.reads[0]
    call = Instruction(op="commit_rank.fail.default", args=(Ref(taken), how), outputs=("failed",))
    changed = replace(actor, instructions=(*actor.instructions, call))
    actors = tuple(changed if a is actor else a for a in part.actors)
    parts = tuple(replace(p, actors=actors) if p is part else p for p in plan.ranks)
    return replace(plan, ranks=parts)


def values(session: Session) -> dict[str, float] | str:
    """Return a number for each state that the rank has, or why they are refused."""
    try:
        return {p.name: float(torch.as_tensor(p.value).double().sum()) for p in session.pieces()}
    except SbpError as error:
        return str(error)


def run(backend_name: str, place: str, how: str) -> dict[str, Any]:
    """Train until the bad step, and return what the session of this rank says then."""
    registry = discover(strict=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    batch = {"x": torch.ones(4, 4), "y": torch.ones(4, 1)}
    graph = capture(model, lambda m, b: (m(b["x"]) - b["y"]).square().mean(), batch, optimizer)
    graph = prepare_step(graph, 1)
    planner = registry.make("planner", "manual", {"pins": {"batch": "S(0)"}})
    mesh = Placement.grid((2,), ("data",))
    strategy = planner.plan(PlanRequest(graph=graph, mesh=mesh, cluster=Cluster.nominal(2)))
    plan = failing(compile_plan(graph, strategy), place, how)
    runtime = registry.make("runtime", "actor", {})
    backend = registry.make("boxing", backend_name, {})
    fail.calls = 0
    with runtime.start(plan, initial_states(model, optimizer), backend) as session:
        history = [values(session)]
        said = ""
        try:
            for _ in range(BAD_STEP + 1):
                session.step(batch, {"lr": 0.1})
                history.append(values(session))
        except SbpError as error:
            said = str(error)
        # A rank that was through with the step hears of the failure a moment later.
        end = time.monotonic() + _NEWS_S
        while not said and not backend.failure_reason() and time.monotonic() < end:
            time.sleep(0.01)
        now = values(session)
        next_step = ""
        try:
            session.step(batch, {"lr": 0.1})
        except SbpError as error:
            next_step = str(error)
        return {
            "rank": session.local_ranks[0],
            "place": place,
            "steps_done": session.steps_done,
            "said": said,
            "states": now if isinstance(now, str) else f"of step {history.index(now)}",
            "next_step": next_step,
        }


def main() -> None:
    backend_name, how, *places = sys.argv[1:]
    for place in places:
        print(json.dumps(run(backend_name, place, how)), flush=True)
    if how == "kill":
        os._exit(0)  # the other rank is gone: there is nothing to close


if __name__ == "__main__":
    main()
