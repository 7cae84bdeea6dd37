"""Inference of a whole strategy from a few pinned tensors, at least predicted cost.

In the order in which they are used: `stages` (where each node runs), `pins` (what the user has
decided), `work` (what is to be decided), `problem` (variables and costs on some mesh axes), `axis`
(one axis as a min-sum problem), `minsum` (solves it), `predict_cost` (the cost of the result).
`nearby` changes a strategy as little as a pin asks for, `one_axis` decides one of its axes again,
and `placed` takes stages that somebody has chosen node by node.
"""

from sbp_core.infer.axis import decide_axis
from sbp_core.infer.companions import StepCompanions
from sbp_core.infer.conversion_group import ConversionGroup, ConversionRequest
from sbp_core.infer.equal_layers import EqualLayers, find_equal_layers, generic_name, node_colours
from sbp_core.infer.greedy_start import start_greedily
from sbp_core.infer.least_prices import LeastPrices
from sbp_core.infer.minsum import Buckets, Factor, minimise, total_cost
from sbp_core.infer.nearby import Nearby, infer_nearby
from sbp_core.infer.one_axis import infer_axis
from sbp_core.infer.pins import (
    PINS,
    PIPE_AXIS,
    Pins,
    PinValue,
    check_pin,
    is_pin_word,
    resolve_pins,
)
from sbp_core.infer.pipeline import Pipelined, pipelined
from sbp_core.infer.placed import infer_placed
from sbp_core.infer.predict import Conversion, conversions, predict_cost
from sbp_core.infer.problem import FORBIDDEN_S, StepProblem
from sbp_core.infer.solve import (
    infer_strategy,
    joint_problem,
    one_forward_one_backward,
    stage_placements,
    strategy_of,
)
from sbp_core.infer.stages import (
    StageMap,
    StagePatterns,
    assign_stages,
    forward_blocks,
    moving_nodes,
)
from sbp_core.infer.tables import CostedVariables, CostTables
from sbp_core.infer.work import Decision, FixedDecisions, SharedTables, StepWork

__all__ = [
    "FORBIDDEN_S",
    "PINS",
    "PIPE_AXIS",
    "Buckets",
    "Conversion",
    "ConversionGroup",
    "ConversionRequest",
    "CostTables",
    "CostedVariables",
    "Decision",
    "EqualLayers",
    "Factor",
    "FixedDecisions",
    "LeastPrices",
    "Nearby",
    "PinValue",
    "Pins",
    "Pipelined",
    "SharedTables",
    "StageMap",
    "StagePatterns",
    "StepCompanions",
    "StepProblem",
    "StepWork",
    "assign_stages",
    "check_pin",
    "conversions",
    "decide_axis",
    "find_equal_layers",
    "forward_blocks",
    "generic_name",
    "infer_axis",
    "infer_nearby",
    "infer_placed",
    "infer_strategy",
    "is_pin_word",
    "joint_problem",
    "minimise",
    "moving_nodes",
    "node_colours",
    "one_forward_one_backward",
    "pipelined",
    "predict_cost",
    "resolve_pins",
    "stage_placements",
    "start_greedily",
    "strategy_of",
    "total_cost",
]
