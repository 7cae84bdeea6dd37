"""Cutting a graph of blocks into pipeline stages.

In this order: `graph` (blocks and what flows between them), `profile` (PipeDream's files), `ideals`
(where a graph can be cut), `pipeline` (the machine, stages, prices, as values), `evaluate` (what a
given pipeline costs), `hierarchy` (the best one on a machine of several levels, when it runs
without flushes).

Knows no tensors, no SBP and no cluster: whoever has those makes blocks and levels of them.
"""

from sbp_planner.stages.evaluate import data_parallel, evaluate
from sbp_planner.stages.graph import Block, BlockGraph, Flow, chain
from sbp_planner.stages.hierarchy import HierarchyPlan, HierarchyProblem, cut_hierarchy
from sbp_planner.stages.ideals import Ideals, order_ideals
from sbp_planner.stages.pipeline import (
    Evaluation,
    Infeasible,
    Level,
    Stage,
    StagePrice,
    WeightVersions,
)
from sbp_planner.stages.profile import Profile, parse_profile, read_profile

__all__ = [
    "Block",
    "BlockGraph",
    "Evaluation",
    "Flow",
    "HierarchyPlan",
    "HierarchyProblem",
    "Ideals",
    "Infeasible",
    "Level",
    "Profile",
    "Stage",
    "StagePrice",
    "WeightVersions",
    "chain",
    "cut_hierarchy",
    "data_parallel",
    "evaluate",
    "order_ideals",
    "parse_profile",
    "read_profile",
]
