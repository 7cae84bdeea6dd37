"""Signatures and execution: calls of PyTorch's operators, verified claims, discovered signatures.

`torch_call` reads a call. `verification` runs every signature that rules claim for it (each a
`trial` on `pieces`). `discovery` finds the signatures of an operator without a rule (`candidates`,
`study`, `isolate`), and `discovery_cache` keeps them. Try it with `python -m sbp_torch.signatures`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_torch.signatures.discovery import discover
    from sbp_torch.signatures.isolate import Completed, run_isolated
    from sbp_torch.signatures.torch_call import (
        call_of,
        describe,
        overload,
        program_of_call,
        run_op,
        tensors_of,
    )
    from sbp_torch.signatures.trial import OpSample, refutation, whole_sample
    from sbp_torch.signatures.verification import verify

__all__ = [
    "Completed",
    "OpSample",
    "call_of",
    "describe",
    "discover",
    "overload",
    "program_of_call",
    "refutation",
    "run_isolated",
    "run_op",
    "tensors_of",
    "verify",
    "whole_sample",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    discovery="discover",
    isolate="Completed run_isolated",
    torch_call="call_of describe overload program_of_call run_op tensors_of",
    trial="OpSample refutation whole_sample",
    verification="verify",
)
