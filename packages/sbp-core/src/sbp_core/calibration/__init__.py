"""Calibration: measured times of a transport, and predictions of the times of all other calls.

A transport is a boxing backend on one machine, such as gloo between processes. In the order in
which they are used: `sample` (one raw measurement), `nonnegative` (least squares with coefficients
>= 0), `curve` (time as a function of bytes, for one kind of call), `structure` (time of any call,
from its algorithm), `held_out` (errors of predictions), `model` (`Calibration`: the samples and
both fits), `validate` (cross-validation). `cluster` has the file of a whole machine.
`sbp-calibrate` measures.
"""

from sbp_core.calibration.curve import Curve
from sbp_core.calibration.held_out import HELD_OUT_BY, FitError, HeldOut
from sbp_core.calibration.model import Calibration
from sbp_core.calibration.sample import CALL_KINDS, MeasuredCase, Measurement
from sbp_core.calibration.structure import TransportModel
from sbp_core.calibration.validate import calibrate, cross_validate

__all__ = [
    "CALL_KINDS",
    "HELD_OUT_BY",
    "Calibration",
    "Curve",
    "FitError",
    "HeldOut",
    "MeasuredCase",
    "Measurement",
    "TransportModel",
    "calibrate",
    "cross_validate",
]
