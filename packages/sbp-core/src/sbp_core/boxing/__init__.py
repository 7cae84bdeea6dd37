"""Boxing: how a tensor gets from one (placement, nd-SBP) to another, and what that costs.

In the order in which they are used: `step` (the values), `slices` (who needs what), `router` (finds
the route), `price` (its time), `backend` (the contract of transports), `execute` (one step for all
ranks at once; knows torch) and `local` (the in-process backend; knows torch), in
which threads divide large steps by `share` and use memory again by `arena`.

Backends of several processes are made of `call` (one call and its deadline), `connections` (how
they break), `process` (a backend but its transport), `parcel` (shards to flat messages and back;
knows torch) and `exchange` (a communicator but its transport; knows torch). How they learn that
one of them failed: `board` (notes of the ranks to each other), `members` (their processes) and
`watch` (the thread that looks). `agree` compares a text over all ranks, `fingerprint` every step;
both know torch.
"""

from sbp_core.boxing.backend import BoxingBackend, Communicator
from sbp_core.boxing.router import conversion_bytes, route
from sbp_core.boxing.step import Route, Step, StepKind

__all__ = [
    "BoxingBackend",
    "Communicator",
    "Route",
    "Step",
    "StepKind",
    "conversion_bytes",
    "route",
]
