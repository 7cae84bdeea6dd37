"""What backends of several processes are made of, but for the transport and the tensors.

`call` is one call and its deadline, `process_backend` a backend, `connections` how it breaks.
`manifest` says what a rank sends and receives, `traffic` counts what it hands over. How ranks learn
that one of them failed: `control_store` (what they leave for each other), `store_client` (one in a
key-value store), `membership` (their processes) and `failure_detector` (the thread that looks).

Stability: internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_core.boxing.processes.call import CollectiveCall, group_name, tag_number, wait_until
    from sbp_core.boxing.processes.connections import Connections
    from sbp_core.boxing.processes.control_store import (
        ControlStore,
        StoreLostError,
        StoreSilentError,
    )
    from sbp_core.boxing.processes.manifest import Manifest, manifest_of, span
    from sbp_core.boxing.processes.process_backend import ProcessBackend, check_ranks
    from sbp_core.boxing.processes.store_client import (
        CountingStore,
        KeyValueControlStore,
        count_opening,
        meet_anew,
    )
    from sbp_core.boxing.processes.traffic import TrafficCounter

__all__ = [
    "CollectiveCall",
    "Connections",
    "ControlStore",
    "CountingStore",
    "KeyValueControlStore",
    "Manifest",
    "ProcessBackend",
    "StoreLostError",
    "StoreSilentError",
    "TrafficCounter",
    "check_ranks",
    "count_opening",
    "group_name",
    "manifest_of",
    "meet_anew",
    "span",
    "tag_number",
    "wait_until",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "CollectiveCall": "call",
        "Connections": "connections",
        "ControlStore": "control_store",
        "CountingStore": "store_client",
        "KeyValueControlStore": "store_client",
        "Manifest": "manifest",
        "ProcessBackend": "process_backend",
        "StoreLostError": "control_store",
        "StoreSilentError": "control_store",
        "TrafficCounter": "traffic",
        "check_ranks": "process_backend",
        "count_opening": "store_client",
        "group_name": "call",
        "manifest_of": "manifest",
        "meet_anew": "store_client",
        "span": "manifest",
        "tag_number": "call",
        "wait_until": "call",
    },
)
