"""Guards: what a captured step took for granted of its program, followed or refused later.

`Guard` compares what the program's Python read when it was captured; `ConnectedStates` lets model
and optimizer read as what was trained, and finds what was written to them.
"""

from __future__ import annotations

from sbp_torch.guards.program import Guard
from sbp_torch.guards.reads import modules_in_eval_mode
from sbp_torch.guards.recorded_values import ChangedValue
from sbp_torch.guards.states import ConnectedStates, connected_elsewhere

__all__ = [
    "ChangedValue",
    "ConnectedStates",
    "Guard",
    "connected_elsewhere",
    "modules_in_eval_mode",
]
