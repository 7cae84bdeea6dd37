"""Find rank and world size of this process, and connect it to a store that all ranks share.

The backend `torch` calls `rendezvous` when it opens, before it connects ranks to move tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.processes import CountingStore, connect_current_store, local_rank, rank_and_size
from sbp_torch.boxing.processes import is_on_loopback, naming_rendezvous, store_at

#: Key of the store for counting the backends that a rank has opened.
COUNTER = "sbp-boxing"

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWorld:
    """Rank of this process, number of ranks, and their shared store.

    Args:
        rank: Rank of this process.
        size: Number of processes; one rank each.
        store: Key-value store of torch.distributed that every process is connected to.
        host: Address that gloo listens on; empty to let gloo choose.
    """

    rank: int
    size: int
    store: CountingStore
    host: str = ""


def rendezvous(config: TorchBoxingConfig) -> TorchWorld:
    """Find the rank of this process and connect it to the shared store.

    Raises:
        ConfigError: neither the config nor the environment defines the rank.
        BoxingError: the rendezvous could not be reached in time.
    """
    rank, size = rank_and_size(
        config.rank,
        config.world_size,
        todo="start the program with torchrun --nproc-per-node=N, or set boxing.{key}",
    )
    limit_s = config.connect_timeout_s
    with naming_rendezvous(config.init_method, rank, size):
        store = connect_current_store(
            lambda: store_at(config.init_method, rank, size, timedelta(seconds=limit_s)),
            COUNTER,
            rank,
            limit_s,
        )
    # If the rendezvous is on the loopback interface, all ranks are on one machine and use it.
    is_chosen = bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    host = _LOOPBACK if is_on_loopback(config.init_method) and not is_chosen else ""
    return TorchWorld(rank=rank, size=size, store=store, host=host)


def device_name(config: TorchBoxingConfig) -> str:
    """Return the device of the shards of this process: `cuda` becomes the GPU of its local rank."""
    return f"cuda:{local_rank(0)}" if config.device == "cuda" else config.device
