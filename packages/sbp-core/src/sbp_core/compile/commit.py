"""Insert the commit: a barrier after all other work of all ranks, before states are overwritten.

    rank 0    forward  backward  all-reduce g | commit | update w   all-gather w
    rank 1    forward  backward  all-reduce g | commit | update w   all-gather w

A rank that fails before the commit never reaches it, so no rank gets past it, and all ranks keep
the states from before the step. The commit is an all-reduce of four bytes among all ranks. A rank
enters it when all its actors have finished, except the actors that overwrite states and the actors
that need their results. Where no state is overwritten, it comes after everything, and new states
are put in force after it. Plans of one rank and plans that write no state need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp_core.boxing import BoxingStep, route
from sbp_core.cluster import Cluster
from sbp_core.compile.actors import Collective, Compute, Instruction
from sbp_core.compile.dataflow import downstream, successors
from sbp_core.compile.physical import PhysicalPlan, RankPlan, token
from sbp_core.cost import boxing_step_time_s
from sbp_core.graph.ir import Phase, Rate, Symbol
from sbp_core.graph.primitives import FULL
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P

#: The actor with which all ranks of a plan commit a step.
COMMIT = "commit"

#: The actor that makes the tensor to be summed: a one on every rank.
_VOTE = "vote to commit"

_SHAPE, _DTYPE = (1,), "float32"


def insert_commit(plan: PhysicalPlan, thread: str, cluster: Cluster | None = None) -> PhysicalPlan:
    """Return the plan with a commit between all other work and the updates in place.

    Args:
        plan: A plan without firing orders, in which `in_place` lists the overwritten states.
        thread: The thread that does the boxing.
        cluster: The machine that determines its time; a nominal one if None.
    """
    actors = [actor for part in plan.distinct for actor in part.actors]
    step = commit_step(plan.stages) if any(actor.writes for actor in actors) else None
    if step is None:
        return plan
    after = downstream(successors(plan), {actor.name for actor in actors if actor.in_place})
    time_s = boxing_step_time_s(step, cluster or Cluster.nominal(1 + max(plan.by_rank)))
    # Ranks that share their actors and registers still share them.
    known: dict[object, RankPlan] = {}
    ranks = []
    for part in plan.ranks:
        stage = next(i for i, placement in enumerate(plan.stages) if part.rank in placement)
        what = id(part.actors), id(part.registers), stage
        if what not in known:
            known[what] = _with_commit(part, after, len(plan.steps), plan, stage, thread, time_s)
        like = known[what]
        ranks.append(replace(part, actors=like.actors, registers=like.registers))
    return replace(plan, steps=(*plan.steps, step), ranks=tuple(ranks))


def commit_step(stages: Sequence[Placement]) -> BoxingStep | None:
    """Return the step in which the ranks of some stages commit; None if there is only one rank."""
    ranks = sorted({rank for stage in stages for rank in stage.rank_list})
    if len(ranks) == 1:
        return None
    everyone = Placement(ranks, axes=("ranks",), device=stages[0].device)
    (step,) = route(_SHAPE, _DTYPE, (everyone, NdSbp(P)), (everyone, NdSbp(B))).steps
    return step


def _with_commit(
    part: RankPlan,
    after: set[str],
    step: int,
    plan: PhysicalPlan,
    stage: int,
    thread: str,
    time_s: float,
) -> RankPlan:
    one = Instruction(
        op=FULL,
        args=(_SHAPE, 1.0),
        kwargs={
            "dtype": Symbol("dtype", _DTYPE),
            "device": Symbol("device", plan.stages[stage].device),
        },
        outputs=(_VOTE,),
        node=_VOTE,
    )
    vote = Compute(
        name=_VOTE, stage=stage, phase=Phase.OPTIMIZER, rate=Rate.STEP, thread=thread,
        outputs=(_VOTE,), instructions=(one,),
    )  # fmt: skip
    commit = Collective(
        name=COMMIT, stage=stage, phase=Phase.OPTIMIZER, rate=Rate.STEP, thread=thread,
        inputs=(_VOTE,), step=step, makes=COMMIT, time_s=time_s,
    )  # fmt: skip
    # The actors that the commit waits for, with their last firing. Actors that it waits for anyway,
    # through their users, are omitted. Values carried to the next micro-batch are not taken in the
    # last one.
    registers = [
        token(actor.name, _VOTE)
        for actor in part.actors
        if actor.name not in after
        and after.issuperset(
            name
            for register in part.outputs_of[actor.name]
            if not register.carries
            for name in register.consumers
        )
    ]
    registers.append(replace(token(_VOTE, COMMIT), name=f"{_VOTE}#0", keys=(_VOTE,)))
    if waiting := [actor.name for actor in part.actors if actor.name in after]:
        registers.append(token(COMMIT, *waiting))
    # Among ready actors it goes before the updates, which wait for it.
    first = next(
        (at for at, actor in enumerate(part.actors) if actor.phase is Phase.OPTIMIZER),
        len(part.actors),
    )
    return replace(
        part,
        actors=(*part.actors[:first], vote, commit, *part.actors[first:]),
        registers=(*part.registers, *registers),
    )
