"""What was measured of a transport, and what that says about calls that were not measured.

In the order in which they are used: `sample` (one raw measurement), `nonnegative` (least squares
whose coefficients are >= 0), `curve` (time over bytes of one kind of call), `structure` (time of
any call from what all kinds have in common), `held_out` (errors of predictions), `model`
(`Calibration`: the samples and both fits), `validate` (how far the fit is off where it did not
look). The file of a whole machine is `cluster`. Measures nothing itself.
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
