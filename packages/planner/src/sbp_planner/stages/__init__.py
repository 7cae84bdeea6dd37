"""Cutting a graph of blocks into pipeline stages.

In this order: `graph` (blocks and the flows between them), `profile` (PipeDream's files), `ideals`
(where a graph can be cut), `pipeline` (the machine, stages, and their costs), `hierarchy` (the best
pipeline without flushes on a machine of several levels, as in PipeDream), `table` (the best
pipeline for any prices, flushed or not), `lazy` (the same for prices that take long to compute),
`flushed` (prices for a flushed pipeline on a machine of several levels).

No tensors, no SBP and no cluster here: the callers make blocks and levels of them.
"""

from sbp_planner.stages.flushed import (
    FlushedPlan,
    FlushedProblem,
    FlushedStage,
    cut_flushed,
    transfer_s,
)
from sbp_planner.stages.graph import AtomicBlock, BlockGraph, Flow, chain
from sbp_planner.stages.hierarchy import HierarchyPlan, HierarchyProblem, cut_hierarchy
from sbp_planner.stages.ideals import Ideals, order_ideals
from sbp_planner.stages.lazy import LazyPlan, PricedStage, cut_lazily
from sbp_planner.stages.pipeline import (
    Infeasible,
    MachineLevel,
    PipelineCost,
    Stage,
    StagePrice,
    WeightVersions,
    data_parallel,
    evaluate,
)
from sbp_planner.stages.profile import Profile, parse_profile, read_profile
from sbp_planner.stages.table import (
    InFlightLimits,
    TablePlan,
    TableProblem,
    TableStage,
    cut_table,
    price_table,
)

__all__ = [
    "AtomicBlock",
    "BlockGraph",
    "Flow",
    "FlushedPlan",
    "FlushedProblem",
    "FlushedStage",
    "HierarchyPlan",
    "HierarchyProblem",
    "Ideals",
    "InFlightLimits",
    "Infeasible",
    "LazyPlan",
    "MachineLevel",
    "PipelineCost",
    "PricedStage",
    "Profile",
    "Stage",
    "StagePrice",
    "TablePlan",
    "TableProblem",
    "TableStage",
    "WeightVersions",
    "chain",
    "cut_flushed",
    "cut_hierarchy",
    "cut_lazily",
    "cut_table",
    "data_parallel",
    "evaluate",
    "order_ideals",
    "parse_profile",
    "price_table",
    "read_profile",
    "transfer_s",
]
