"""The contract of runtimes: start a plan on states, run steps, hand states back.

Stability: provisional.
"""

from __future__ import annotations

from sbp_core.runtime.contract import Number, Runtime, Session, StepResult, Watch, unwatched

__all__ = ["Number", "Runtime", "Session", "StepResult", "Watch", "unwatched"]
