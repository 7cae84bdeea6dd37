"""Boxing: how a tensor gets from one (placement, nd-SBP) to another, and at what cost.

In the order in which they are used: `step` (the values), `slices` (which rank needs which slice),
`price` (time, by `algorithms`), `routes` (steps, time, and as a table), `router` (finds a route, by
`routing` and `memory`), `backend` (the contract of transports). The work of one rank in a step:
`collective_call` (one call and its deadline), `manifest` (what it sends and receives, and how many
bytes it hands over).

The parts of backends of several processes are in `sbp_core.processes`, the code that touches
tensors is in `sbp_torch.boxing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_core.boxing.backend import (
        BoxingBackend,
        Communicator,
        Delivered,
        Delivery,
        LaunchSpec,
        Pending,
        SurvivingRanks,
        thread_share,
    )
    from sbp_core.boxing.collective_call import CollectiveCall
    from sbp_core.boxing.manifest import Manifest, TrafficCounter, manifest_of, span
    from sbp_core.boxing.router import clear_routes, conversion_bytes, route
    from sbp_core.boxing.routes import Route
    from sbp_core.boxing.slices import (
        Bounds,
        TransferPiece,
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
    "CollectiveCall",
    "Communicator",
    "Delivered",
    "Delivery",
    "LaunchSpec",
    "Manifest",
    "Pending",
    "Route",
    "StepKind",
    "SurvivingRanks",
    "TrafficCounter",
    "TransferPiece",
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
    "manifest_of",
    "partial_axes",
    "route",
    "sent_bytes",
    "span",
    "thread_share",
    "transfer_bytes",
    "transfer_pieces",
    "volume",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    backend=(
        "BoxingBackend Communicator Delivered Delivery LaunchSpec Pending SurvivingRanks "
        "thread_share"
    ),
    collective_call="CollectiveCall",
    manifest="Manifest TrafficCounter manifest_of span",
    router="clear_routes conversion_bytes route",
    routes="Route",
    slices=(
        "Bounds TransferPiece bounds_of can_transfer collective_bytes collective_pieces "
        "intersection is_realisable itemsize local_transition partial_axes sent_bytes "
        "transfer_bytes transfer_pieces volume"
    ),
    step="BoxingStep StepKind",
)
