"""Compile: graph and strategy -> `PhysicalPlan`.

In order: `lower` (with `legality`, `items`), `buckets` (with `packing`), `backward_parts`,
`segments` (with `levels`, `program`, `cuts`, `offload`, `instructions`, `registers`), `donation`
(with `dataflow`, `overwriting`), `commit`, `order` (with `token_game`).

before: a graph of ops on logical tensors, and a signature for each
after:  for each rank, actors with registers, quotas, threads and a fixed firing order
"""

from __future__ import annotations

from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    ActorId,
    BoxingActor,
    Collective,
    Compute,
    Instruction,
    Receive,
    Send,
    dying_keys,
    keys_in,
    keys_out,
)
from sbp_core.compile.backward_parts import split_backward, waited_for
from sbp_core.compile.buckets import bucket
from sbp_core.compile.commit import COMMIT, insert_commit
from sbp_core.compile.donation import donate_states
from sbp_core.compile.items import LoweredItems
from sbp_core.compile.legality import check_strategy, offloadable
from sbp_core.compile.lowering import lower
from sbp_core.compile.offload import FETCH_THREAD, STORE_THREAD, owner_of
from sbp_core.compile.order import early_receives, order_firings
from sbp_core.compile.overwriting import first_overwrites, is_in_place, written_arguments
from sbp_core.compile.physical import PLAN, Channel, PhysicalPlan, RankPlan, Register, StateSlot
from sbp_core.compile.segments import CompileOptions, boxing_thread, form_plan
from sbp_core.compile.token_game import TokenGame
from sbp_core.graph.ir import LogicalGraph
from sbp_core.graph.primitives import LOCAL_BOX, OVERWRITE
from sbp_core.strategy import Strategy

__all__ = [
    "COMMIT",
    "FETCH_THREAD",
    "LOCAL_BOX",
    "OVERWRITE",
    "PLAN",
    "STORE_THREAD",
    "Accumulate",
    "Actor",
    "ActorId",
    "BoxingActor",
    "Channel",
    "Collective",
    "CompileOptions",
    "Compute",
    "Instruction",
    "LoweredItems",
    "PhysicalPlan",
    "RankPlan",
    "Receive",
    "Register",
    "Send",
    "StateSlot",
    "TokenGame",
    "bucket",
    "check_strategy",
    "compile_plan",
    "dying_keys",
    "early_receives",
    "first_overwrites",
    "form_plan",
    "is_in_place",
    "keys_in",
    "keys_out",
    "lower",
    "offloadable",
    "order_firings",
    "owner_of",
    "written_arguments",
]


def compile_plan(
    graph: LogicalGraph, strategy: Strategy, options: CompileOptions | None = None
) -> PhysicalPlan:
    """Compile a graph under a strategy; the result is not yet checked (see `sbp_core.check`).

    Raises:
        PlanError: the strategy does not cover the graph, names a stage that does not exist, or its
            quotas allow no order.
        SignatureError: an op may not be cut as in the strategy, or has no rule.
        SbpValueError: an SBP does not fit the shape of its tensor or the mesh.
    """
    options = options or CompileOptions()
    lowered = lower(graph, strategy, options.cluster)
    lowered = bucket(graph, lowered, options.most_bucket_bytes(strategy), options.cluster)
    if strategy.splits_backward:
        lowered = split_backward(lowered)
    elif options.input_gradients_first:
        lowered = split_backward(lowered, waited_for(lowered))
    plan = form_plan(graph, strategy, lowered, options)
    if options.in_place_states:
        plan = donate_states(plan)
    plan = insert_commit(plan, boxing_thread(options), options.cluster)
    return order_firings(plan, strategy.actions)
