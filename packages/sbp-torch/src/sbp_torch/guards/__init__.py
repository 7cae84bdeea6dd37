"""Guards on a captured step: find changes of the program and its tensors since capture.

`Guard` compares the values that the program's Python code read during capture. `ConnectedStates`
gives reads of the model and the optimizer the trained values, and finds writes to them.
"""

from __future__ import annotations

from sbp_torch.guards.program import Guard
from sbp_torch.guards.reads import modules_in_eval_mode
from sbp_torch.guards.recorded_values import ANEW, ChangedValue
from sbp_torch.guards.states import ConnectedStates, connected_elsewhere

__all__ = [
    "ANEW",
    "ChangedValue",
    "ConnectedStates",
    "Guard",
    "connected_elsewhere",
    "modules_in_eval_mode",
]
