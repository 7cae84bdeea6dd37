"""Runtimes: the contract, the reference runtime, and what runtimes share.

Importing this imports no torch; `single`, `reference`, `store` and `codegen` do.
"""

from __future__ import annotations

from sbp_core.runtime.contract import Runtime, Session, StepResult

__all__ = ["Runtime", "Session", "StepResult"]
