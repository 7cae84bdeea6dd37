"""Boxing: how a tensor gets from one (placement, nd-SBP) to another, and what that costs.

In the order in which they are used: `step` (the values), `slices` (who needs what), `price` (time,
by `algorithms`), `routes` (steps, time, and as a table), `router` (finds a route, by `routing` and
`memory`), `backend` (the contract of transports).

`processes` has what backends of several processes are made of, `supervision` starts such processes
and sees that they end. What touches tensors is in `sbp_torch.boxing`.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.backend import (
        BoxingBackend,
        Communicator,
        Delivered,
        Delivery,
        Pending,
        SurvivingRanks,
    )
    from sbp_core.boxing.router import clear_routes, conversion_bytes, route
    from sbp_core.boxing.routes import Route
    from sbp_core.boxing.slices import (
        Bounds,
        Piece,
        bounds_of,
        can_transfer,
        collective_bytes,
        collective_pieces,
        intersection,
        is_realisable,
        itemsize,
        local_transition,
        partial_axes,
        sent_bytes,
        transfer_bytes,
        transfer_pieces,
        volume,
    )
    from sbp_core.boxing.step import BoxingStep, StepKind

__all__ = [
    "Bounds",
    "BoxingBackend",
    "BoxingStep",
    "Communicator",
    "Delivered",
    "Delivery",
    "Pending",
    "Piece",
    "Route",
    "StepKind",
    "SurvivingRanks",
    "bounds_of",
    "can_transfer",
    "clear_routes",
    "collective_bytes",
    "collective_pieces",
    "conversion_bytes",
    "intersection",
    "is_realisable",
    "itemsize",
    "local_transition",
    "partial_axes",
    "route",
    "sent_bytes",
    "transfer_bytes",
    "transfer_pieces",
    "volume",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Bounds": "slices",
        "BoxingBackend": "backend",
        "Communicator": "backend",
        "Delivered": "backend",
        "Delivery": "backend",
        "Pending": "backend",
        "SurvivingRanks": "backend",
        "Piece": "slices",
        "Route": "routes",
        "BoxingStep": "step",
        "StepKind": "step",
        "bounds_of": "slices",
        "can_transfer": "slices",
        "collective_bytes": "slices",
        "collective_pieces": "slices",
        "conversion_bytes": "router",
        "is_realisable": "slices",
        "intersection": "slices",
        "itemsize": "slices",
        "local_transition": "slices",
        "partial_axes": "slices",
        "clear_routes": "router",
        "route": "router",
        "sent_bytes": "slices",
        "transfer_bytes": "slices",
        "transfer_pieces": "slices",
        "volume": "slices",
    },
)
