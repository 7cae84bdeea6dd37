"""Time saving and loading by sbp, by safetensors alone, and by torch.distributed.checkpoint.

    python integration/benchmarks/checkpoint_time.py [--mib 512] [--rounds 7] [--folder /tmp]

There are two processes, each of which owns half of every tensor. The ways take turns in each round:

    safetensors    each process writes its halves into a file, and syncs it; reads and copies them
    checkpoint     `save` and `Checkpoint` of `sbp_launch.checkpoint`: with checksums, and verified
    dcp            `torch.distributed.checkpoint` of DTensors: `save` and `load`

Files to load are in the page cache: they are read once before, without timing. The time of a way is
that of its slower process. The table shows medians of wall time over rounds, the processor seconds
of both processes, and the bytes on the disk. Nothing is asserted, because machines differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sbp_core.runtime import StatePiece
from sbp_core.units import format_bytes
from sbp_launch.checkpoint import (
    Checkpoint,
    LocalStorage,
    Metadata,
    Processes,
    save,
)

NUM_PROCESSES, ROWS, COLUMNS = 2, 1024, 2048

#: For each way and action: wall seconds and processor seconds of each round.
Times = dict[tuple[str, str], list[tuple[float, float]]]


class Ways:
    """The ways to save and load the halves of one process."""

    def __init__(self, rank: int, folder: Path, num_tensors: int) -> None:
        torch.manual_seed(rank)
        self.rank, self.folder = rank, folder
        self.bounds = ((rank * ROWS, (rank + 1) * ROWS), (0, COLUMNS))
        self.halves = {f"{n}.weight": torch.randn(ROWS, COLUMNS) for n in range(num_tensors)}
        mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
        self.sharded = {
            name: DTensor.from_local(half, mesh, [Shard(0)]) for name, half in self.halves.items()
        }
        self.processes = Processes(rank=rank, ranks=tuple(range(NUM_PROCESSES)), gather=_gather)
        self.acts: Mapping[tuple[str, str], Callable[[], object]] = {
            ("safetensors", "save"): self.save_file,
            ("checkpoint", "save"): self.save,
            ("dcp", "save"): lambda: dcp.save(self.sharded, checkpoint_id=folder / "dcp"),
            ("safetensors", "load"): self.load_file,
            ("checkpoint", "load"): self.load,
            ("dcp", "load"): self.load_dcp,
        }

    def warm(self, way: str) -> None:
        """Read the files of a way into the page cache."""
        for path in sorted((self.folder / way).rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    while file.read(2**23):
                        pass

    def save_file(self) -> None:
        path = self.folder / "safetensors" / f"{self.rank}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(self.halves, path)
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)

    def load_file(self) -> dict[str, Tensor]:
        path = self.folder / "safetensors" / f"{self.rank}.safetensors"
        return {name: value.clone() for name, value in load_file(path).items()}

    def save(self) -> None:
        pieces = [
            StatePiece(
                name=name,
                shape=(NUM_PROCESSES * ROWS, COLUMNS),
                dtype="float32",
                bounds=self.bounds,
                value=half,
            )
            for name, half in self.halves.items()
        ]
        storage = LocalStorage(self.folder / "checkpoint")
        save(storage, "step-00000001", Metadata(step=1, seed=0), pieces, self.processes)

    def load(self) -> dict[str, Tensor]:
        with Checkpoint(LocalStorage(self.folder / "checkpoint"), "step-00000001") as saved:
            return {name: saved.part(name, self.bounds) for name in saved}

    def load_dcp(self) -> None:
        empty = {
            name: DTensor.from_local(
                torch.empty(ROWS, COLUMNS), value.device_mesh, value.placements
            )
            for name, value in self.sharded.items()
        }
        dcp.load(empty, checkpoint_id=self.folder / "dcp")


def _gather(text: str) -> list[str]:
    found: list[Any] = [None] * NUM_PROCESSES
    dist.all_gather_object(found, text)
    return found


def run(rank: int, folder: Path, num_tensors: int, rounds: int, told: Any) -> None:
    """Measure in one process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=NUM_PROCESSES
    )
    ways, times = Ways(rank, folder, num_tensors), Times()
    for _ in range(rounds):
        for key, act in ways.acts.items():
            if key[1] == "load":
                ways.warm(key[0])
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            act()
            done = (time.perf_counter() - began, time.process_time() - began_cpu)
            times.setdefault(key, []).append(done)
    told.put(times)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="of states, over both processes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    options = parser.parse_args()
    size_bytes = options.mib * 2**20
    num_tensors = max(1, size_bytes // (NUM_PROCESSES * ROWS * COLUMNS * 4))
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        context = mp.get_context("spawn")
        told = context.Queue()
        mp.spawn(run, (folder, num_tensors, options.rounds, told), NUM_PROCESSES, join=False)
        found: list[Times] = [told.get(timeout=1800) for _ in range(NUM_PROCESSES)]
        table = Table(title=f"{format_bytes(size_bytes)} of states", box=SIMPLE_HEAD)
        for name in ("", "", "seconds", "a second", "processor", "on the disk"):
            table.add_column(name, justify="right" if name else "left")
        for way, act in found[0]:
            rows = list(zip(*(times[way, act] for times in found), strict=True))
            wall = statistics.median(max(one[0] for one in row) for row in rows)
            processor = statistics.median(sum(one[1] for one in row) for row in rows)
            files = [path for path in (folder / way).rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files)
            speed = f"{format_bytes(size_bytes / wall)}"
            table.add_row(way, act, f"{wall:.2f}", speed, f"{processor:.2f} s", format_bytes(size))
        Console().print(table)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
