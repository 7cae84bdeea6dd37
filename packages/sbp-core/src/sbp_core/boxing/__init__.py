"""Boxing: how a tensor gets from one (placement, nd-SBP) to another, and what that costs.

In the order in which they are used: `step` (the values), `slices` (who needs what), `price` (time,
by `algorithms`), `routes` (steps, time, and as a table), `router` (finds a route, by `routing` and
`memory`), `backend` (the contract of transports).

`processes` has what backends of several processes are made of, `supervision` starts such processes
and sees that they end. What touches tensors is in `sbp_torch.boxing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.backend import BoxingBackend, Communicator
    from sbp_core.boxing.router import conversion_bytes, route
    from sbp_core.boxing.routes import Route
    from sbp_core.boxing.step import Step, StepKind

__all__ = [
    "BoxingBackend",
    "Communicator",
    "Route",
    "Step",
    "StepKind",
    "conversion_bytes",
    "route",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "BoxingBackend": "backend",
        "Communicator": "backend",
        "Route": "routes",
        "Step": "step",
        "StepKind": "step",
        "conversion_bytes": "router",
        "route": "router",
    },
)
