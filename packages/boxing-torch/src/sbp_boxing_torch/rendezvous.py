"""How the processes of a run find each other: rank, world size and the store that all reach.

The only module that reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

from sbp_boxing_torch.configs import TorchBoxingConfig
from sbp_core.errors import ConfigError
from sbp_core.processes import CountingStore, connect_current_store
from sbp_torch.boxing.processes import is_on_loopback, naming_rendezvous, store_at

#: Name by which the backends of a rank are counted in a store.
COUNTER = "sbp-boxing"

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchWorld:
    """Where this process stands in the run: its rank, the number of ranks, their store.

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
    rank = _number("rank", config.rank, "RANK")
    size = _number("world_size", config.world_size, "WORLD_SIZE")
    if rank >= size:
        raise ConfigError(
            f"rank={rank} is no rank of world_size={size}", accepted="0 .. world_size - 1"
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
    if config.device != "cuda":
        return config.device
    local = os.environ.get("LOCAL_RANK", "0")
    return f"cuda:{local if local.isdecimal() else 0}"


def _number(key: str, given: int | None, variable: str) -> int:
    """Return a setting, or the environment variable that stands for it."""
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if not text.isdecimal():
        raise ConfigError(
            f"{key} is not set, and the environment has {variable}={text!r}",
            accepted="an integer >= 0",
            todo=f"start the program with torchrun --nproc-per-node=N, or set boxing.{key}",
        )
    return int(text)
