"""The contract of runtimes: start a plan on states, run steps, hand states back."""

from __future__ import annotations

from sbp_core.runtime.contract import Runtime, Session, StepResult

__all__ = ["Runtime", "Session", "StepResult"]
