"""The part of multi-process backends that handles tensors.

`packed_buffer` packs the pieces of a `Manifest` into flat messages; `exchange` is the communicator.
`agreement` compares a text over all ranks, `fingerprint` compares every step; both work with any
backend. `rendezvous_store` is the store for the rendezvous of the processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_torch.boxing.processes.agreement import agree, gather_texts
    from sbp_torch.boxing.processes.exchange import Await, ExchangeCommunicator, Finish, Role, after
    from sbp_torch.boxing.processes.fingerprint import Fingerprinted
    from sbp_torch.boxing.processes.packed_buffer import PackedBuffers, pack
    from sbp_torch.boxing.processes.rendezvous_store import (
        is_on_loopback,
        naming_rendezvous,
        store_at,
    )

__all__ = [
    "Await",
    "ExchangeCommunicator",
    "Fingerprinted",
    "Finish",
    "PackedBuffers",
    "Role",
    "after",
    "agree",
    "gather_texts",
    "is_on_loopback",
    "naming_rendezvous",
    "pack",
    "store_at",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    agreement="agree gather_texts",
    exchange="Await ExchangeCommunicator Finish Role after",
    fingerprint="Fingerprinted",
    packed_buffer="PackedBuffers pack",
    rendezvous_store="is_on_loopback naming_rendezvous store_at",
)
