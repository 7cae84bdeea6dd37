"""Runtimes on PyTorch: the reference runtime, one device, and what runtimes share.

`reference` runs all ranks in lock-step in one thread, `single` a graph on one device; `store` holds
what a rank keeps between steps, `devices` says where, `accumulation` what it sums over
micro-batches, `partial_update` what is left when a step failed while states were overwritten.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_torch.runtime.accumulation import Accumulation
    from sbp_torch.runtime.devices import RankDevice
    from sbp_torch.runtime.partial_update import PARTIAL_UPDATE_TODO, overwrite, partially_updated
    from sbp_torch.runtime.reference import ReferenceSession
    from sbp_torch.runtime.store import StateStore, Values, feed

__all__ = [
    "PARTIAL_UPDATE_TODO",
    "Accumulation",
    "RankDevice",
    "ReferenceSession",
    "StateStore",
    "Values",
    "feed",
    "overwrite",
    "partially_updated",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Accumulation": "accumulation",
        "PARTIAL_UPDATE_TODO": "partial_update",
        "RankDevice": "devices",
        "ReferenceSession": "reference",
        "StateStore": "store",
        "Values": "store",
        "feed": "store",
        "overwrite": "partial_update",
        "partially_updated": "partial_update",
    },
)
