"""How the processes of a run find each other: rank, world size and the store that all reach."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.processes import CountingStore, connect_current_store, local_rank, rank_and_size
from sbp_torch.boxing.processes import is_on_loopback, naming_rendezvous, store_at

#: Name by which the backends of a rank are counted in a store.
COUNTER = "sbp-boxing"

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWorld:
    """Where this process is in the run: its rank, the number of ranks, their store.

    Args:
        rank: Rank of this process.
        size: Number of processes; one rank each.
        store: Key-value store of torch.distributed that every process is connected to.
        host: Address that gloo listens on; empty for the one that it finds.
    """

    rank: int
    size: int
    store: CountingStore
    host: str = ""


def rendezvous(config: TorchBoxingConfig) -> TorchWorld:
    """Find this process' rank and connect it to the store of all.

    Raises:
        ConfigError: neither the config nor the environment says which rank this is.
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
    # Who meets on the loopback interface is on one machine, and talks there.
    is_chosen = bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    host = _LOOPBACK if is_on_loopback(config.init_method) and not is_chosen else ""
    return TorchWorld(rank=rank, size=size, store=store, host=host)


def device_name(config: TorchBoxingConfig) -> str:
    """Return where the shards of this process live: `cuda` is the GPU of its place on the host."""
    return f"cuda:{local_rank(0)}" if config.device == "cuda" else config.device
