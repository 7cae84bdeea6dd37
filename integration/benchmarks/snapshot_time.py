"""Time the overhead of a snapshot, and of a checkpoint that is written from it: two processes.

    python integration/benchmarks/snapshot_time.py [--only dlrm] [--rounds 15]

Over gloo. The ways take turns in each round, each time in another order; ranks begin together:

    step        an ordinary step
    snapshot    `session.snapshot()`, then the step; copies are in reused memory
    copy        every piece of `session.pieces()` copied into reused memory, then the step
    save        every process writes its file of a checkpoint, then the step
    beside      `session.snapshot()`, then steps while a thread writes it; the time of all these
                steps minus as many times the median step

The files go to a temporary folder, and are synced. The time of a way is that of its slower process.
The table shows medians over rounds, and the overhead of a way as a fraction of a step: in wall
seconds and in processor seconds of both processes, which are more reliable on a loaded machine. The
call of `snapshot` alone is a part of the wall time. Nothing is asserted, because machines differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sbp_core.plugins import discover
from sbp_core.runtime import Snapshot, StatePiece
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.checkpoint import LocalStorage, Metadata, write_part

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from matrix import OWN_TABLE, Ours
from programs import LEARNING_RATE, MODELS
from sbp_ways import Setting, start_session

NUM_RANKS, WARM_UP = 2, 3

CASES: Mapping[str, tuple[str, Ours]] = {
    "gpt, data parallel": ("gpt", Ours(preset="manual/data_parallel", boxing="torch")),
    "gpt, ZeRO-1": ("gpt", Ours(preset="manual/zero1", boxing="torch")),
    "dlrm, data parallel": ("dlrm", Ours(preset="manual/data_parallel", boxing="torch")),
    "dlrm, table split": (
        "dlrm",
        Ours(preset="manual/custom", boxing="torch", pins=OWN_TABLE),
    ),
}

#: For a way in a round: wall seconds, processor seconds, seconds of the call of `snapshot`; steps.
Times = tuple[float, float, float, int]


class Ways:
    """The ways to run one step of a session."""

    def __init__(self, session: Any, batch: Mapping[str, Tensor], folder: Path) -> None:
        self.session, self.batch = session, batch
        self.staged = LocalStorage(folder).stage("step-1")
        self.kept: dict[str, Tensor] = {}
        self.owned_bytes = sum(
            piece.value.nbytes for piece in session.pieces() if isinstance(piece.value, Tensor)
        )
        self.ways: Mapping[str, Callable[[], tuple[float, int]]] = {
            "step": self.step,
            "snapshot": self.snapshot,
            "copy": self.copy,
            "save": self.save,
            "beside": self.save_beside,
        }

    def step(self) -> tuple[float, int]:
        self.session.step(self.batch, {"lr": LEARNING_RATE})
        return 0.0, 1

    def snapshot(self) -> tuple[float, int]:
        began = time.perf_counter()
        snapshot = self.session.snapshot()
        took_s = time.perf_counter() - began
        self.step()
        snapshot.release()
        return took_s, 1

    def write(self, pieces: Iterable[StatePiece] | Snapshot) -> None:
        write_part(self.staged, dist.get_rank(), Metadata(step=1, seed=0), pieces)

    def save(self) -> tuple[float, int]:
        self.write(self.session.pieces())
        return self.step()

    def save_beside(self) -> tuple[float, int]:
        with self.session.snapshot() as snapshot:
            writer = threading.Thread(target=lambda: self.write(snapshot))
            writer.start()
            num_steps, busy = 0, torch.ones(())
            while busy:
                self.step()
                num_steps += 1
                busy = torch.tensor(float(writer.is_alive()))
                dist.all_reduce(busy, dist.ReduceOp.MAX)
            writer.join()
        return 0.0, num_steps

    def copy(self) -> tuple[float, int]:
        for piece in self.session.pieces():
            if isinstance(piece.value, Tensor):
                if piece.name not in self.kept:
                    self.kept[piece.name] = torch.empty_like(piece.value)
                self.kept[piece.name].copy_(piece.value)
        return self.step()

    def timed(self, name: str) -> Times:
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        call_s, num_steps = self.ways[name]()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        return wall_s, cpu_s, call_s, num_steps


def work(rank: int, case: str, rounds: int, folder: str, found: Any) -> None:
    """Run one case on one rank; put its times by way."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    own = dist.PrefixStore("benchmark", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=NUM_RANKS)
    registry: Any = discover(strict=True)
    name, ours = CASES[case]
    with ExitStack() as stack:
        setting = Setting(model=MODELS[name], registry=registry, store=store)
        session = start_session(ours, case, setting, stack=stack).session
        ways = Ways(session, MODELS[name].batch_of(0), Path(folder))
        names = list(ways.ways)
        times: dict[str, list[Times]] = {name: [] for name in names}
        for index in range(rounds + WARM_UP):
            for turn in range(len(names)):
                name = names[(turn + index) % len(names)]
                taken = ways.timed(name)
                if index >= WARM_UP:
                    times[name].append(taken)
        found.put((rank, ways.owned_bytes, times))
    dist.barrier()
    dist.destroy_process_group()


def measure(case: str, rounds: int) -> tuple[int, dict[str, list[Times]]]:
    """Return the largest bytes that a process owns, and the times of each way in each round."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        found = context.SimpleQueue()
        processes = [
            context.Process(target=work, args=(rank, case, rounds, folder, found))
            for rank in range(NUM_RANKS)
        ]
        for process in processes:
            process.start()
        parts = [found.get() for _ in processes]
        for process in processes:
            process.join()
    owned = max(size for _, size, _ in parts)
    return owned, {
        name: [
            (max(wall), sum(cpu), max(call), max(steps))
            for wall, cpu, call, steps in (
                zip(*pair, strict=True)
                for pair in zip(*(times[name] for _, _, times in parts), strict=True)
            )
        ]
        for name in parts[0][2]
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(
        f"{'case':22}{'way':10}{'clock':>12}{'added':>8}{'processor':>12}{'added':>8}{'call':>12}"
    )
    for case in (case for case in CASES if arguments.only in case):
        owned, times = measure(case, arguments.rounds)
        medians = {
            name: [statistics.median(column) for column in zip(*found, strict=True)]
            for name, found in times.items()
        }
        wall, cpu, *_ = medians["step"]
        for name, (way_wall, way_cpu, call, steps) in medians.items():
            line = f"{case if name == 'step' else '':22}{name:10}"
            for value, base in ((way_wall, wall), (way_cpu, cpu)):
                line += f"{format_seconds(value):>12}"
                line += f"{(value - steps * base) / base:+8.1%}" if name != "step" else " " * 8
            print(f"{line}{steps:7.0f}" + (f"{format_seconds(call):>12}" if call else ""))
        print(f"{'':22}a process owns {format_bytes(owned)} at most")


if __name__ == "__main__":
    main()
