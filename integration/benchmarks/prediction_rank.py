"""One process of a cell of `prediction_error.py`: it runs plans together with other ranks.

    mpiexec -n RANKS python prediction_rank.py MODEL BOXING TRIAL OUT

TRIAL is a `Trial` as JSON; the first rank writes the cells to OUT.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from prediction_cells import Trial, cells_of

from sbp_boxing_torch import TorchBackend, TorchBoxingConfig, TorchWorld
from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import discover


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Ranks in processes: this process has one rank, and MPI gathers results.

    Args:
        store: The rendezvous store of ranks over gloo; None over MPI.
    """

    registry: Any
    store: dist.Store | None

    @property
    def rank(self) -> int:
        return int(MPI.COMM_WORLD.Get_rank())

    def backend(self, name: str) -> BoxingBackend:
        """Return a backend that is not yet open, for a session of this name."""
        if self.store is None:
            made: BoxingBackend = self.registry.make("boxing", "mpi")
            return made
        size = MPI.COMM_WORLD.Get_size()
        world = TorchWorld(rank=self.rank, size=size, store=dist.PrefixStore(name, self.store))
        return TorchBackend(TorchBoxingConfig(), world=world)

    def barrier(self) -> None:
        """Wait for all."""
        MPI.COMM_WORLD.Barrier()

    def gathered(self, value: Any) -> Sequence[Any]:
        """Return the value of each process, in rank order."""
        return list(MPI.COMM_WORLD.allgather(value))


def main() -> None:
    name, boxing, trial, out = sys.argv[1:]
    torch.set_num_threads(1)
    ranks = Processes(registry=discover(strict=True), store=_store() if boxing == "torch" else None)
    found = cells_of(ranks.registry, ranks, name, Trial(**json.loads(trial)))
    if ranks.rank == 0:
        Path(out).write_text(json.dumps([asdict(cell) for cell in found]), encoding="utf-8")


def _store() -> dist.Store:
    """Return a store that the first rank keeps."""
    world = MPI.COMM_WORLD
    if world.Get_rank() > 0:
        return dist.TCPStore("127.0.0.1", world.bcast(None), is_master=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world.bcast(store.port)
    return store


if __name__ == "__main__":
    main()
