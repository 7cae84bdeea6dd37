"""The contract of runtimes: start a plan on states, run steps, hand states back.

`contract` has the classes; `ownership` says which rank owns which part of a state, and how a whole
one is gathered; `trace` has what a session notes of steps that are traced.

Stability: provisional.
"""

from __future__ import annotations

from sbp_core.runtime.contract import Number, Runtime, Session, StepResult, Watch, unwatched
from sbp_core.runtime.ownership import (
    StatePiece,
    check_destination,
    gather_routes,
    known_state,
    state_owners,
    state_slots,
)
from sbp_core.runtime.trace import Held, Span, SpanKind, TensorMeter, Trace

__all__ = [
    "Held",
    "Number",
    "Runtime",
    "Session",
    "Span",
    "SpanKind",
    "StatePiece",
    "StepResult",
    "TensorMeter",
    "Trace",
    "Watch",
    "check_destination",
    "gather_routes",
    "known_state",
    "state_owners",
    "state_slots",
    "unwatched",
]
