"""The interpreter of plans: it replays one step of a plan on values of any domain.

`interpreter` has the common part of all replays: the order of firings (`firings`, which uses the
token game of `sbp_core.compile`), the content of registers and channels, sums, and the lifetimes of
values. A `domain` defines the values, and how each kind of firing computes them: counted tokens
(`sbp_core.check`), storages (`sbp_core.memory`), or tensors (the reference runtime).
"""

from __future__ import annotations

from sbp_core.interpreter.domain import Domain, Firing, InstructionDomain
from sbp_core.interpreter.firings import ticks
from sbp_core.interpreter.interpreter import Interpreter

__all__ = ["Domain", "Firing", "InstructionDomain", "Interpreter", "ticks"]
