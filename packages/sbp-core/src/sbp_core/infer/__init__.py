"""Inference of a whole strategy from a few pinned tensors, at least predicted cost.

In the order in which they are used: `stages` (where each node runs), `pins` (what is decided),
`work` (what is to be decided), `axis` (one mesh axis as a min-sum problem), `minsum` (solves it),
`predict_cost` (what the result costs).

Stability: provisional.
"""

from sbp_core.infer.minsum import Factor, minimise
from sbp_core.infer.pins import PINS, PIPE_AXIS, PinValue, check_pin
from sbp_core.infer.pipeline import Pipelined, pipelined
from sbp_core.infer.predict import Conversion, conversions, predict_cost
from sbp_core.infer.solve import infer_strategy, one_forward_one_backward, stage_placements
from sbp_core.infer.stages import StagePatterns

__all__ = [
    "PINS",
    "PIPE_AXIS",
    "Conversion",
    "Factor",
    "PinValue",
    "Pipelined",
    "StagePatterns",
    "check_pin",
    "conversions",
    "infer_strategy",
    "minimise",
    "one_forward_one_backward",
    "pipelined",
    "predict_cost",
    "stage_placements",
]
