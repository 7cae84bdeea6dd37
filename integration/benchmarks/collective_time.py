"""Time the collectives of the `torch` and `mpi` backends against direct calls of the same library.

`nox -s benchmarks`, or `python integration/benchmarks/collective_time.py [--backend torch|mpi]
[--sizes 1M,16M] [--rounds 0.5] [--only all-gather]`. Two processes; sizes are bytes of one rank's
shard before the step, float32. Each round runs both sides in alternating order:

- donated: the all-reduce of a tensor that may be overwritten, against the library's in-place call;
- all other cases make a new result and do not change the shard, on both sides;
- rows of "columns" split the last dim, so that both sides pack or unpack.

Direct calls are torch.distributed with gloo, or mpi4py's blocking calls on buffers. The time of a
round is that of the slower rank. The table shows medians over rounds, and the ratio of direct time
to the time of sbp, for medians and for the fastest rounds. Results are compared before they are
timed; times are not asserted, because machines differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sbp_core.boxing import BoxingBackend, BoxingStep, route
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.processes import mpiexec_specs
from sbp_core.sbp import NdSbp
from sbp_core.units import format_bytes, format_seconds

NUM_RANKS, ITEM_BYTES, DEADLINE_S = 2, 4, 60.0
SIZES = {"1K": 2**10, "1M": 2**20, "16M": 2**24, "64M": 2**26}
ROUNDS = {"1K": 300, "1M": 40, "16M": 12, "64M": 6}
COLUMNS_BYTES = range(2**20, 2**25)


class ByHand(ABC):
    """Direct calls of a library; tensors are contiguous, and results are preallocated."""

    @abstractmethod
    def barrier(self) -> None: ...
    @abstractmethod
    def all_reduce(self, values: Tensor) -> None: ...
    @abstractmethod
    def all_reduce_into(self, shard: Tensor) -> Tensor: ...
    @abstractmethod
    def all_gather(self, result: Tensor, shard: Tensor) -> None: ...
    @abstractmethod
    def reduce_scatter(self, result: Tensor, shard: Tensor) -> None: ...
    @abstractmethod
    def all_to_all(self, result: Tensor, shard: Tensor) -> None: ...


class Gloo(ByHand):
    """torch.distributed, over its default group."""

    def __init__(self) -> None:
        # A separate group, because a barrier warms up the threads and connections of its group.
        self._apart = dist.new_group()
        names = ("all_gather_single", "all_gather_into_tensor")
        self._all_gather = next(getattr(dist, name) for name in names if hasattr(dist, name))
        names = ("reduce_scatter_single", "reduce_scatter_tensor")
        self._reduce_scatter = next(getattr(dist, name) for name in names if hasattr(dist, name))

    def barrier(self) -> None:
        dist.barrier(self._apart)

    def all_reduce(self, values: Tensor) -> None:
        dist.all_reduce(values)

    def all_reduce_into(self, shard: Tensor) -> Tensor:
        result = shard.clone()
        dist.all_reduce(result)
        return result

    def all_gather(self, result: Tensor, shard: Tensor) -> None:
        self._all_gather(result.view(-1), shard.view(-1))

    def reduce_scatter(self, result: Tensor, shard: Tensor) -> None:
        self._reduce_scatter(result.view(-1), shard.view(-1))

    def all_to_all(self, result: Tensor, shard: Tensor) -> None:
        dist.all_to_all_single(result.view(-1), shard.view(-1))


class Mpi(ByHand):
    """mpi4py's blocking calls, over a duplicate of the world."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD.Dup()

    def barrier(self) -> None:
        self._comm.Barrier()

    def all_reduce(self, values: Tensor) -> None:
        self._comm.Allreduce(self._mpi.IN_PLACE, values.numpy())

    def all_reduce_into(self, shard: Tensor) -> Tensor:
        result = torch.empty_like(shard)
        self._comm.Allreduce(shard.numpy(), result.numpy())
        return result

    def all_gather(self, result: Tensor, shard: Tensor) -> None:
        self._comm.Allgather(shard.numpy(), result.numpy())

    def reduce_scatter(self, result: Tensor, shard: Tensor) -> None:
        counts = [result.numel()] * NUM_RANKS
        self._comm.Reduce_scatter(shard.numpy(), result.numpy(), counts)

    def all_to_all(self, result: Tensor, shard: Tensor) -> None:
        self._comm.Alltoall(shard.numpy(), result.numpy())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One collective: the step, and the direct call."""

    name: str
    step: BoxingStep
    shard_shape: tuple[int, ...]
    by_hand: Callable[[ByHand, Tensor], Tensor]
    donate: bool = False


def all_reduce(library: ByHand, shard: Tensor) -> Tensor:
    library.all_reduce(shard)
    return shard


def all_reduce_into(library: ByHand, shard: Tensor) -> Tensor:
    return library.all_reduce_into(shard)


def all_gather(library: ByHand, shard: Tensor) -> Tensor:
    result = shard.new_empty(NUM_RANKS * shard.shape[0], *shard.shape[1:])
    library.all_gather(result, shard)
    return result


def reduce_scatter(library: ByHand, shard: Tensor) -> Tensor:
    result = shard.new_empty(shard.shape[0] // NUM_RANKS, *shard.shape[1:])
    library.reduce_scatter(result, shard)
    return result


def all_to_all(library: ByHand, shard: Tensor) -> Tensor:
    result = torch.empty_like(shard)
    library.all_to_all(result, shard)
    return result.view(NUM_RANKS, 1, -1)


def gather_columns(library: ByHand, shard: Tensor) -> Tensor:
    parts = shard.new_empty(NUM_RANKS, *shard.shape)
    library.all_gather(parts, shard)
    return torch.cat(tuple(parts), dim=1)


def reduce_columns(library: ByHand, shard: Tensor) -> Tensor:
    parts = torch.stack(shard.chunk(NUM_RANKS, dim=1))
    result = torch.empty_like(parts[0])
    library.reduce_scatter(result, parts)
    return result


def rows_to_columns(library: ByHand, shard: Tensor) -> Tensor:
    parts = torch.stack(shard.chunk(NUM_RANKS, dim=1))
    result = torch.empty_like(parts)
    library.all_to_all(result, parts)
    return result.view(-1, shard.shape[1] // NUM_RANKS)


def cases(shard_bytes: int) -> list[Case]:
    """Return the cases for shards of a size."""
    rows, columns, n = shard_bytes // ITEM_BYTES // 64, 64, NUM_RANKS
    whole, tall, wide = (rows, columns), (n * rows, columns), (rows, n * columns)
    cube = (1, n, rows * columns // n)
    cubes = (n, *cube[1:])
    in_place = Case(
        name="all-reduce, donated",
        step=only_step(whole, "P", "B"),
        shard_shape=whole,
        by_hand=all_reduce,
        donate=True,
    )
    found = [in_place]
    for name, shape, source, target, shard_shape, by_hand in (
        ("all-reduce", whole, "P", "B", whole, all_reduce_into),
        ("all-gather", tall, "S(0)", "B", whole, all_gather),
        ("reduce-scatter", whole, "P", "S(0)", whole, reduce_scatter),
        ("all-to-all", cubes, "S(0)", "S(1)", cube, all_to_all),
        ("all-gather, columns", wide, "S(1)", "B", whole, gather_columns),
        ("reduce-scatter, columns", whole, "P", "S(1)", whole, reduce_columns),
        ("all-to-all, columns", tall, "S(0)", "S(1)", whole, rows_to_columns),
    ):
        if name.endswith("columns") and shard_bytes not in COLUMNS_BYTES:
            continue
        step = only_step(shape, source, target)
        found.append(Case(name=name, step=step, shard_shape=shard_shape, by_hand=by_hand))
    return found


def only_step(shape: tuple[int, ...], source: str, target: str) -> BoxingStep:
    mesh = Placement(list(range(NUM_RANKS)), ("x",))
    ends = (mesh, NdSbp.parse(source)), (mesh, NdSbp.parse(target))
    (step,) = route(shape, "float32", *ends).steps
    return step


def measure(
    rank: int, backend: BoxingBackend, library: ByHand, settings: argparse.Namespace
) -> list[tuple[str, str, list[float], list[float]]]:
    """Run the rounds as one rank; return (size, case, direct seconds, seconds of sbp)."""
    torch.set_num_threads(1)
    communicator = backend.communicator(rank)
    found = []
    torch.manual_seed(rank)
    for size, case in [(name, case) for name in settings.sizes for case in cases(SIZES[name])]:
        if settings.only not in case.name:
            continue

        def sbp(shard: Tensor, case: Case = case) -> Tensor:
            return communicator.collective(
                case.step, shard, tag=case.name, deadline_s=DEADLINE_S, donate=case.donate
            )

        def by_hand(shard: Tensor, case: Case = case) -> Tensor:
            return case.by_hand(library, shard)

        shard = torch.randint(-8, 9, case.shard_shape).float()
        assert torch.equal(sbp(shard.clone()), by_hand(shard.clone())), f"{case.name} differs"
        shard.zero_()  # repeated in-place reductions must stay finite
        times: dict[Callable[[Tensor], Tensor], list[float]] = {by_hand: [], sbp: []}
        for index in range(1 + max(2, round(settings.rounds * ROUNDS[size]))):
            for way in (by_hand, sbp) if index % 2 else (sbp, by_hand):
                library.barrier()
                began = time.perf_counter()
                way(shard)
                took = time.perf_counter() - began
                if index:  # the first round warms up
                    times[way].append(took)
        found.append((size, case.name, times[by_hand], times[sbp]))
    return found


def torch_rank(rank: int, port: int, settings: argparse.Namespace, pipe: Any) -> None:
    from sbp_boxing_torch import TorchBackend, TorchBoxingConfig, TorchWorld

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    own = dist.PrefixStore("by-hand", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=NUM_RANKS)
    world = TorchWorld(rank=rank, size=NUM_RANKS, store=store)
    backend = TorchBackend(TorchBoxingConfig(), world=world)
    backend.open(range(NUM_RANKS))
    pipe.send(measure(rank, backend, Gloo(), settings))
    backend.close()
    dist.destroy_process_group()


def run_torch(settings: argparse.Namespace) -> None:
    """Start the ranks of the backend `torch`, and print their results."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, ranks = [], []
    for rank in range(NUM_RANKS):
        ours, theirs = context.Pipe()
        given = (rank, store.port, settings, theirs)
        ranks.append(context.Process(target=torch_rank, args=given, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    show("torch", "gloo by hand", [pipe.recv() for pipe in pipes])
    for process in ranks:
        process.join()


def mpi_rank(settings: argparse.Namespace) -> None:
    from mpi4py import MPI

    from sbp_boxing_nccl import MpiBackend, MpiBoxingConfig

    rank = MPI.COMM_WORLD.Get_rank()
    backend = MpiBackend(MpiBoxingConfig())
    backend.open(range(NUM_RANKS))
    found = MPI.COMM_WORLD.gather(measure(rank, backend, Mpi(), settings))
    backend.close()
    if rank == 0:
        show("mpi", "MPI by hand", found)


def run_mpi() -> None:
    """Start this script again, as the ranks of the backend `mpi`."""
    if find_spec("mpi4py") is None:
        print("backend mpi: left out, as mpi4py is not here")
        return
    command = [sys.executable, *sys.argv, "--backend", "mpi", "--as-rank"]
    try:
        (start,) = mpiexec_specs(NUM_RANKS, command)
    except BoxingError as error:
        print(f"backend mpi: left out: {error.what}")
        return
    environment = {**start.defaults, **os.environ, **start.environment}
    subprocess.run(start.command, check=True, env=environment)


def show(backend: str, hand: str, found: Sequence[Any]) -> None:
    """Print the table; `found` has the results of `measure` by rank."""
    title = f"backend {backend}, {NUM_RANKS} ranks"
    print(f"{title:34} {hand:>14} {'sbp':>9} {'ratio':>6} fastest")
    for rows in zip(*found, strict=True):
        size, name = rows[0][:2]
        by_hand, sbp = (
            [max(times) for times in zip(*(row[way] for row in rows), strict=True)]
            for way in (2, 3)
        )
        medians = statistics.median(by_hand), statistics.median(sbp)
        what = f"{name}, {format_bytes(SIZES[size])}"
        first, second = map(format_seconds, medians)
        ratios = f"{medians[0] / medians[1]:6.2f} {min(by_hand) / min(sbp):7.2f}"
        print(f"{what:34} {first:>14} {second:>9} {ratios}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--backend", choices=("torch", "mpi"), help="both if not given")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of %(default)s")
    parser.add_argument("--rounds", type=float, default=1.0, help="factor of their number")
    parser.add_argument("--only", default="", help="part of a collective's name")
    parser.add_argument("--as-rank", action="store_true", help="this process is a rank of mpiexec")
    settings = parser.parse_args()
    settings.sizes = settings.sizes.split(",")
    if settings.as_rank:
        mpi_rank(settings)
        return
    if settings.backend != "mpi":
        run_torch(settings)
    if settings.backend != "torch":
        run_mpi()


if __name__ == "__main__":
    main()
