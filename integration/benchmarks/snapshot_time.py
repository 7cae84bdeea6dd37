"""Time what a snapshot adds to a step, beside copying all states first: two processes over gloo.

    python integration/benchmarks/snapshot_time.py [--only dlrm] [--rounds 15]

Ways, in turns within each round, in another order each time; all processes begin together:

    step        as always
    snapshot    `session.snapshot()`, then the step; what is copied is in memory that is used again
    copy        every piece of `session.pieces()` copied into such memory, then the step

Nothing is written to a disk. A way takes as long as its slower process; printed are medians over
rounds, and what a way adds to a step, in seconds on the clock and in processor seconds of both
processes: on a machine that does other things the latter say more. The call of `snapshot` alone is
a part of the former. Nothing is asserted: machines differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sbp_core.plugins import discover
from sbp_core.units import format_bytes, format_seconds

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from matrix import OWN_TABLE, Ours
from programs import LEARNING_RATE, MODELS
from sbp_ways import start_session

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

#: Of a way in a round: seconds on the clock, of the processor, and of the call of `snapshot`.
Times = tuple[float, float, float]


class Ways:
    """The ways to run one step of a session."""

    def __init__(self, session: Any, batch: Mapping[str, Tensor]) -> None:
        self.session, self.batch = session, batch
        self.kept: dict[str, Tensor] = {}
        self.owned_bytes = sum(
            piece.value.nbytes for piece in session.pieces() if isinstance(piece.value, Tensor)
        )
        self.ways: Mapping[str, Callable[[], float]] = {
            "step": self.step,
            "snapshot": self.snapshot,
            "copy": self.copy,
        }

    def step(self) -> float:
        self.session.step(self.batch, {"lr": LEARNING_RATE})
        return 0.0

    def snapshot(self) -> float:
        began = time.perf_counter()
        snapshot = self.session.snapshot()
        took_s = time.perf_counter() - began
        self.step()
        snapshot.release()
        return took_s

    def copy(self) -> float:
        for piece in self.session.pieces():
            if isinstance(piece.value, Tensor):
                if piece.name not in self.kept:
                    self.kept[piece.name] = torch.empty_like(piece.value)
                self.kept[piece.name].copy_(piece.value)
        return self.step()

    def timed(self, name: str) -> Times:
        dist.barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        call_s = self.ways[name]()
        return time.perf_counter() - began, time.process_time() - began_cpu, call_s


def work(rank: int, case: str, rounds: int, folder: str, found: Any) -> None:
    """Run one case on one rank; put its times by way."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    own = dist.PrefixStore("benchmark", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=NUM_RANKS)
    registry: Any = discover(strict=True)
    name, ours = CASES[case]
    with ExitStack() as stack:
        session, _ = start_session(ours, case, MODELS[name], registry, store, stack=stack)
        ways = Ways(session, MODELS[name].batch_of(0))
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
    """Return the most bytes that a process owns, and the times of each way in each round."""
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
            (max(wall), sum(cpu), max(call))
            for wall, cpu, call in (
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
        wall, cpu, _ = medians["step"]
        for name, (way_wall, way_cpu, call) in medians.items():
            line = f"{case if name == 'step' else '':22}{name:10}"
            for value, base in ((way_wall, wall), (way_cpu, cpu)):
                line += f"{format_seconds(value):>12}"
                line += f"{(value - base) / base:+8.1%}" if name != "step" else " " * 8
            print(line + (f"{format_seconds(call):>12}" if call else ""))
        print(f"{'':22}a process owns {format_bytes(owned)} at most")


if __name__ == "__main__":
    main()
