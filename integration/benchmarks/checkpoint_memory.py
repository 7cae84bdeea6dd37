"""Measure the memory of saving and loading in addition to the states: two processes, and one.

    python integration/benchmarks/checkpoint_memory.py [--mib 1024]

Linear layers of 16 MiB with AdamW, data parallel over gloo, so each process holds all states and
owns half of them. The ways, in this order:

    step        ordinary steps
    wait        every process writes its file of a checkpoint, then steps
    limit       steps while a thread writes, from copies of at most 240 MiB, as in runs
    all         steps while a thread writes, from copies of all overwritten states
    load        a session of another plan, ZeRO-1, starts from that checkpoint
    again       that session, after a step, loads the checkpoint in place of its states
    alone       afterwards, one process with both ranks starts from the checkpoint
    again alone that session, after a step, loads the checkpoint in place of its states

The table shows the peak of resident memory (Linux) of the process that takes more: for saving,
beyond a step; for loading, beyond the shards of the new session; for loading again, beyond the
memory at its beginning. It also shows the number of steps during a save, and the longest of these.
Nothing is asserted.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.plugins import discover
from sbp_core.runtime import Session
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.checkpoint import (
    COPY_BYTES,
    BackgroundSave,
    Checkpoint,
    LocalStorage,
    Metadata,
    Processes,
    save,
    step_name,
)
from sbp_torch.boxing import LocalBackend

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from matrix import Ours
from programs import LEARNING_RATE, Model
from sbp_ways import Setting, make_backend, start_session

NUM_RANKS, WARM_UP, STEPS, WIDTH = 2, 2, 4, 2048
LIMITS: Mapping[str, int | None] = {"limit": COPY_BYTES, "all": None}

#: Bytes of memory, number of steps, and seconds of the longest step.
Found = dict[str, tuple[int, int, float]]


class Layers(nn.Module):
    """A sequence of square layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.layers(batch["x"]).square().mean()


def memory(key: str) -> int:
    """Return the bytes of resident memory of this process: now (VmRSS), or the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(key))
    return 1024 * int(line.split()[1])


def forget_most() -> None:
    """Return free memory to the system, and reset the peak of resident memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def gathered(text: str) -> Sequence[str]:
    found: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(found, text)
    return found


class Saves:
    """The ways to take steps and to save."""

    def __init__(self, session: Session, batch: Mapping[str, Tensor], folder: Path) -> None:
        self.session, self.batch, self.storage = session, batch, LocalStorage(folder)
        ranks = tuple(range(NUM_RANKS))
        self.processes = Processes(rank=dist.get_rank(), ranks=ranks, gather=gathered)
        self.step_s: list[float] = []

    def step(self) -> None:
        began = time.perf_counter()
        self.session.step(self.batch, {"lr": LEARNING_RATE})
        self.step_s.append(time.perf_counter() - began)

    def take(self, way: str) -> None:
        name, metadata = step_name(1), Metadata(step=1, seed=0)
        if way in LIMITS:
            snapshot = self.session.snapshot(limit_bytes=LIMITS[way])
            under_way = BackgroundSave(self.storage, name, metadata, snapshot, self.processes)
            while not under_way.is_done:
                self.step()
                if not any(gathered("busy" if under_way.is_busy else "")):
                    under_way.advance()
            return
        if way == "wait":
            save(self.storage, name, metadata, self.session.pieces(), self.processes)
        for _ in range(STEPS):
            self.step()

    def measured(self, way: str) -> tuple[int, int, float]:
        """Return the peak of memory, the number of steps, and the time of the longest step."""
        self.step_s.clear()
        dist.barrier()
        forget_most()
        self.take(way)
        return memory("VmHWM"), len(self.step_s), max(self.step_s)


def load(
    registry: Any,
    plan: PhysicalPlan,
    backend: BoxingBackend,
    batch: Mapping[str, Tensor],
    folder: Path,
    found: Found,
    where: str,
) -> int:
    """Start a session from the checkpoint, and load it again; return the bytes of its shards."""
    with Checkpoint(LocalStorage(folder), step_name(1)) as checkpoint:
        forget_most()
        before = memory("VmRSS")
        began = time.perf_counter()
        with registry.make("runtime", "actor", {}).start(plan, checkpoint, backend) as session:
            took_s, most = time.perf_counter() - began, memory("VmHWM")
            held = (
                session.shard(name, rank) for name in checkpoint for rank in session.local_ranks
            )
            shards = sum(value.nbytes for value in held if isinstance(value, Tensor))
            found[where.strip() or "load"] = (most - before - shards, 0, took_s)
            session.step(batch, {"lr": LEARNING_RATE})
            forget_most()
            before = memory("VmRSS")
            began = time.perf_counter()
            session.load_state_dict(checkpoint)
            took_s = time.perf_counter() - began
            found[f"again{where}"] = (memory("VmHWM") - before, 0, took_s)
    return shards


def work(rank: int, mib: int, folder: str, told: Any) -> None:
    """Measure in one process."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    own = dist.PrefixStore("benchmark", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=NUM_RANKS)
    registry: Any = discover(strict=True)
    count = mib * 2**20 // (3 * 4 * WIDTH * WIDTH)
    model = Model(
        make=lambda _: Layers(count),
        batch=lambda generator: {"x": torch.randn(4, WIDTH, generator=generator)},
        options={"fused": True},
    )
    found: Found = {}
    setting = Setting(model=model, registry=registry, store=store)
    with ExitStack() as stack:
        ours = Ours(preset="manual/data_parallel", boxing="torch")
        session = start_session(ours, "save", setting, stack=stack).session
        saves = Saves(session, model.batch_of(0), Path(folder))
        for _ in range(WARM_UP):
            saves.step()
        for way in ("step", "wait", *LIMITS):
            most, steps, longest_s = saves.measured(way)
            found[way] = (most - found["step"][0] if way != "step" else most, steps, longest_s)
    del session, saves
    with ExitStack() as stack:
        ours = Ours(preset="manual/zero1", boxing="torch")
        plan = start_session(ours, "plan", setting, stack=stack).plan
    gc.collect()
    backend, batch = make_backend(registry, "torch", "load", store), model.batch_of(0)
    shards = load(registry, plan, backend, batch, Path(folder), found, "")
    dist.barrier()
    if rank == 0:
        load(registry, plan, LocalBackend(), batch, Path(folder), found, " alone")
    told.put((shards, found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="of states")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        told = context.SimpleQueue()
        processes = [
            context.Process(target=work, args=(rank, options.mib, folder, told))
            for rank in range(NUM_RANKS)
        ]
        for process in processes:
            process.start()
        parts = [told.get() for _ in processes]
        for process in processes:
            process.join()
    print(f"{'way':12}{'memory':>12}{'steps':>8}{'longest':>12}")
    for way in max((found for _, found in parts), key=len):
        told_of = [found[way] for _, found in parts if way in found]
        size, steps, longest_s = map(max, zip(*told_of, strict=True))
        print(f"{way:12}{format_bytes(size):>12}{steps:>8}{format_seconds(longest_s):>12}")
    print(f"shards of a process that loads: {format_bytes(max(shards for shards, _ in parts))}")


if __name__ == "__main__":
    main()
