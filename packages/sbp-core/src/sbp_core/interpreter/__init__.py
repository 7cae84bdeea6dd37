"""The one interpreter of plans: it replays a step on values of any domain.

`interpreter` owns what every replay has in common: who fires next (`firings`, above the token game
of `sbp_core.compile`), what registers and channels hold, sums, and who takes and drops what when. A
`domain` says what a value is and what each kind of firing makes of values: tokens that are counted
(`sbp_core.check`), storages (`sbp_core.memory`), tensors (the reference runtime).
"""

from __future__ import annotations

from sbp_core.interpreter.domain import Domain, Firing, InstructionDomain
from sbp_core.interpreter.firings import ticks
from sbp_core.interpreter.interpreter import Interpreter

__all__ = ["Domain", "Firing", "InstructionDomain", "Interpreter", "ticks"]
