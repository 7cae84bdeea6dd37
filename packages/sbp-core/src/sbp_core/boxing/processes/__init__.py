"""What backends of several processes are made of, but for the transport and the tensors.

`call` is one call and its deadline (`pending_calls`: those that are not over, `arrivals`: how far a
rank has come), `process_backend` a backend, `connections` how it breaks, `abandonable` a call that
may be left behind. `manifest` says what a rank sends and receives, `traffic` counts what it hands
over. How ranks learn that one of them failed: `control_store` (the entries by which they know of
each other), `store_client` (those entries in a key-value store, which `store_rendezvous` finds),
`membership` (their processes), `siblings` (those of one launcher, before that) and
`failure_detector` (the thread that looks). `survivors` are those that are left then, and what they
say to each other.

Stability: internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.processes.abandonable import run_abandonable
    from sbp_core.boxing.processes.call import CollectiveCall, group_name, tag_number, wait_until
    from sbp_core.boxing.processes.connections import CLOSE_TIMEOUT_S, Connections
    from sbp_core.boxing.processes.control_store import (
        FIRST_STAYS,
        ControlStore,
        StoreLostError,
        StoreSilentError,
    )
    from sbp_core.boxing.processes.manifest import Manifest, manifest_of, span
    from sbp_core.boxing.processes.process_backend import ProcessBackend, check_ranks
    from sbp_core.boxing.processes.siblings import Siblings
    from sbp_core.boxing.processes.store_client import KeyValueControlStore
    from sbp_core.boxing.processes.store_rendezvous import (
        CountingStore,
        connect_current_store,
        count_opening,
    )
    from sbp_core.boxing.processes.survivors import Survivors
    from sbp_core.boxing.processes.traffic import TrafficCounter

__all__ = [
    "CLOSE_TIMEOUT_S",
    "FIRST_STAYS",
    "CollectiveCall",
    "Connections",
    "ControlStore",
    "CountingStore",
    "KeyValueControlStore",
    "Manifest",
    "ProcessBackend",
    "Siblings",
    "StoreLostError",
    "StoreSilentError",
    "Survivors",
    "TrafficCounter",
    "check_ranks",
    "connect_current_store",
    "count_opening",
    "group_name",
    "manifest_of",
    "run_abandonable",
    "span",
    "tag_number",
    "wait_until",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CLOSE_TIMEOUT_S": "connections",
        "FIRST_STAYS": "control_store",
        "CollectiveCall": "call",
        "Connections": "connections",
        "ControlStore": "control_store",
        "CountingStore": "store_rendezvous",
        "KeyValueControlStore": "store_client",
        "Manifest": "manifest",
        "ProcessBackend": "process_backend",
        "Siblings": "siblings",
        "StoreLostError": "control_store",
        "StoreSilentError": "control_store",
        "Survivors": "survivors",
        "TrafficCounter": "traffic",
        "check_ranks": "process_backend",
        "connect_current_store": "store_rendezvous",
        "count_opening": "store_rendezvous",
        "group_name": "call",
        "manifest_of": "manifest",
        "run_abandonable": "abandonable",
        "span": "manifest",
        "tag_number": "call",
        "wait_until": "call",
    },
)
