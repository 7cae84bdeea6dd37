"""Time training steps on two processes: sbp's plans, and PyTorch's DDP and FSDP2.

`nox -s benchmarks` or `python integration/benchmarks/peer_time.py [ROUNDS]`. Both processes hold
every way, one thread each over gloo, and the ways take turns. sbp's ways differ in how collectives
are issued: one for every gradient; in buckets; in buckets by a thread of their own, so that they
overlap with compute. Prints the median of each way's slower rank, its ratio to its peer, and what
a step sends. Nothing is asserted: machines differ.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from step_time import (
    BATCH_SIZE,
    LEARNING_RATE,
    Step,
    make_program,
    model_loss,
    preset_planner,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sbp_aten.passes import prepare_step
from sbp_boxing_torch import TorchBackend, TorchBoxingConfig, TorchWorld
from sbp_core import (
    Cluster,
    CompileOptions,
    Device,
    Link,
    Placement,
    PlanRequest,
    check,
    compile_plan,
)
from sbp_core.plugins import discover
from sbp_core.units import format_bytes, format_seconds
from sbp_torch.capture import capture, initial_states
from sbp_torch.update_options import UpdateOptions

NUM_RANKS = 2

#: Two processes over gloo on 2 cores, roughly as `sbp-calibrate boxing=torch` measures them.
MACHINE = Cluster(
    name="gloo",
    num_devices=NUM_RANKS,
    devices_per_node=NUM_RANKS,
    device=Device(memory_bytes=2**32, flop_per_s={"float32": 6e10}, memory_bytes_per_s=1e10),
    intra_node=Link(latency_s=5e-4, bytes_per_s=5e8),
)

#: Peer -> the planner's preset that does what it does.
PRESETS = {"DDP": "manual/data_parallel", "FSDP2": "manual/zero"}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "one by one": {"bucket_bytes": 0},
    "buckets": {},
    "buckets, own thread": {"boxing_thread": True},
}


class WithLoss(nn.Module):
    """The model whose forward gives the loss, as DDP and FSDP2 ask for."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model_loss(self.model, batch)
        return loss


def peer_step(peer: str, registry: Any, rank: int) -> Step:
    model = WithLoss(make_program(registry)[0])
    if peer == "DDP":
        whole: nn.Module = DistributedDataParallel(model)
    else:
        for block in model.model.blocks:  # type: ignore[union-attr] # the zoo's GPT has them
            fully_shard(block)
        whole = fully_shard(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        whole({name: value.chunk(NUM_RANKS)[rank] for name, value in batch.items()}).backward()
        optimizer.step()

    return step


def sbp_step(
    preset: str, options: Mapping[str, Any], registry: Any, world: TorchWorld, stack: ExitStack
) -> tuple[Step, int]:
    """Return the step, and the bytes that all ranks send in one."""
    model, optimizer = make_program(registry)
    data = registry.make("data", "stdlib", {})
    update = UpdateOptions(fused=True)
    graph = capture(model, model_loss, data.batch(0, BATCH_SIZE), optimizer, update=update)
    graph = prepare_step(graph)
    mesh = Placement.grid((NUM_RANKS,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=MACHINE)
    strategy = preset_planner(registry, preset).plan(request)
    plan = compile_plan(graph, strategy, CompileOptions(**options, cluster=MACHINE))
    check(plan)
    runtime = registry.make("runtime", "actor", {})
    backend = TorchBackend(TorchBoxingConfig(), world=world)
    session = stack.enter_context(runtime.start(plan, initial_states(model, optimizer), backend))
    return lambda batch: session.step(batch, {"lr": LEARNING_RATE}), plan.boxing_bytes


def measure(rank: int, port: int, rounds: int, pipe: Connection) -> None:
    """Run all ways on one rank, and send their bytes and times."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    own = dist.PrefixStore("peers", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=NUM_RANKS)
    registry: Any = discover(strict=True)
    data = registry.make("data", "stdlib", {})
    with ExitStack() as stack:
        steps: dict[tuple[str, str], Step] = {}
        moved: dict[tuple[str, str], int] = {}
        for peer, preset in PRESETS.items():
            steps[peer, peer] = peer_step(peer, registry, rank)
            for name, options in OPTIONS.items():
                apart = dist.PrefixStore(f"{preset}, {name}", store)
                world = TorchWorld(rank=rank, size=NUM_RANKS, store=apart)
                way = peer, f"{preset}, {name}"
                steps[way], moved[way] = sbp_step(preset, options, registry, world, stack)
        times: dict[tuple[str, str], list[float]] = {way: [] for way in steps}
        gc.collect()
        gc.freeze()
        for index in range(rounds + 2):
            batch = data.batch(index, BATCH_SIZE)
            for way, step in steps.items():
                dist.barrier()
                began = time.perf_counter()
                step(batch)
                if index > 1:  # two rounds warm up
                    times[way].append(time.perf_counter() - began)
    pipe.send((moved, times))
    dist.destroy_process_group()


def show(found: Sequence[Any]) -> None:
    """Print the table; `found` has what `measure` sent, by rank."""
    moved, every = found[0][0], [times for _, times in found]
    print(f"{'way':42} {'median':>9} {'fastest':>9} {'ratio':>6} {'bytes/step':>11}")
    medians: dict[str, float] = {}
    for way in every[0]:
        peer, name = way
        slower = [max(pair) for pair in zip(*(times[way] for times in every), strict=True)]
        median = statistics.median(slower)
        medians.setdefault(peer, median)  # the peer itself comes first
        fastest, size = format_seconds(min(slower)), format_bytes(moved.get(way, 0))
        ratio = median / medians[peer]
        print(f"{name:42} {format_seconds(median):>9} {fastest:>9} {ratio:6.2f} {size:>11}")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, ranks = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        given = (rank, store.port, rounds, theirs)
        ranks.append(context.Process(target=measure, args=given, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    show([pipe.recv() for pipe in pipes])
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
