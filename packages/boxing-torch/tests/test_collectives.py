"""Every way in which a collective is run gives what the step gives, and leaves shards alone."""

from datetime import timedelta
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool

from sbp_boxing_torch import communicator as limits
from sbp_boxing_torch import group as group_limits
from sbp_boxing_torch._torch_compat import all_gather_parts, gloo_group, reduce_scatter_parts
from sbp_boxing_torch.backend import TorchBackend
from sbp_core.boxing.slices import collective_bytes, sent_bytes
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, local_shape
from sbp_torch.boxing.execute import apply_step

LARGE = limits._EXCHANGED_BYTES // 8 + 3
KINDS = {
    "all-reduce": (StepKind.ALL_REDUCE, "P", "B"),
    "maximum": (StepKind.ALL_REDUCE, "P(max)", "B"),
    "all-gather": (StepKind.ALL_GATHER, "S(0)", "B"),
    "all-gather, columns": (StepKind.ALL_GATHER, "S(1)", "B"),
    "reduce-scatter": (StepKind.REDUCE_SCATTER, "P", "S(0)"),
    "reduce-scatter, columns": (StepKind.REDUCE_SCATTER, "P", "S(1)"),
    "all-to-all": (StepKind.ALL_TO_ALL, "S(0)", "S(1)"),
}


def one(
    name: str, shape: tuple[int, ...], mesh: Placement, axes: tuple[int, ...], dtype: str
) -> BoxingStep:
    """The step of a kind on some axes of a mesh, with B on the others."""
    kind, before, after = KINDS[name]
    source, target = (
        ", ".join(entry if axis in axes else "B" for axis in range(mesh.num_axes))
        for entry in (before, after)
    )
    step = BoxingStep(
        kind=kind,
        shape=shape,
        dtype=dtype,
        source=(mesh, NdSbp.parse(source)),
        target=(mesh, NdSbp.parse(target)),
        axes=axes,
        size_bytes=0,
    )
    assert collective_bytes(step) > 0
    return step


def values(step: BoxingStep, rank: int) -> torch.Tensor:
    """The shard of one rank: small integers, whose sums are exact in any order."""
    mesh, sbp = step.source
    shape = local_shape(step.shape, sbp, mesh.mesh_shape, mesh.coordinate(rank))
    step_size = 1 if step.dtype == "bool" else 7
    numbers = torch.arange(prod(shape)).reshape(shape) * (rank + 3) % (step_size + 1)
    return numbers.to(getattr(torch, step.dtype))


def run_all(rank: int, backend: TorchBackend, steps: list[BoxingStep], donate: bool) -> list[str]:
    """Return what is wrong after each step, if anything."""
    communicator, wrong = backend.communicator(rank), []
    for number, step in enumerate(steps):
        everyone = {other: values(step, other) for other in step.source[0].rank_list}
        shard, before = values(step, rank), communicator.sent_bytes
        after = communicator.collective(
            step, shard, tag=str(number), deadline_s=30.0, donate=donate
        )
        if not torch.equal(after, apply_step(step, everyone)[rank]) or not after.is_contiguous():
            wrong.append(f"wrong values on rank {rank} after {step}")
        if not donate and not torch.equal(shard, values(step, rank)):
            wrong.append(f"rank {rank} changed its shard in {step}")
        if communicator.sent_bytes - before != sent_bytes(step, rank):
            wrong.append(f"wrong bytes on rank {rank} after {step}")
    return wrong


def check(pool: RankPool, num_ranks: int, steps: list[BoxingStep], donate: bool = False) -> None:
    job = partial(run_all, steps=steps, donate=donate)
    assert [text for wrong in pool.run(num_ranks, job) for text in wrong] == []


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("donate", [False, True])
def test_small_and_large_even_and_uneven_collectives_make_the_shards_of_the_step(
    pool: RankPool, num_ranks: int, donate: bool
) -> None:
    mesh = Placement.grid((num_ranks,), ("x",))
    shapes = [(6, 6), (7, 5), (1, 2), (LARGE, 2)]
    steps = [one(name, shape, mesh, (0,), "float32") for name, shape in product(KINDS, shapes)]

    check(pool, num_ranks, steps, donate)


@pytest.mark.slow
def test_merged_axes_are_one_group_and_others_are_many(pool: RankPool) -> None:
    mesh = Placement([[3, 1], [0, 2]], ("x", "y"))
    axes = [(0,), (1,), (0, 1)]
    steps = [
        one(name, (8, 5), mesh, chosen, "float32")
        for name, chosen in product(KINDS, axes)
        if KINDS[name][0] is not StepKind.ALL_TO_ALL or len(chosen) == 1
    ]

    check(pool, 4, steps)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_what_gloo_cannot_reduce_is_reduced_here(pool: RankPool, num_ranks: int) -> None:
    mesh = Placement.grid((num_ranks,), ("x",))
    steps = [
        one(name, (LARGE, 2) if dtype == "int16" else (5, 2), mesh, (0,), dtype)
        for name, dtype in product(("all-reduce", "reduce-scatter"), ("bool", "int16", "complex64"))
    ]

    check(pool, num_ranks, steps, donate=True)


def reduce_views(rank: int, backend: TorchBackend, rows: int) -> list[bool]:
    """Donate a column of something larger, and one value that stands for many."""
    step = one("all-reduce", (rows, 1), Placement.grid((2,), ("x",)), (0,), "float32")
    whole, single = torch.ones(rows, 2), torch.ones(1, 1)
    results = [
        backend.communicator(rank).collective(step, shard, tag=tag, deadline_s=30.0, donate=True)
        for shard, tag in ((whole[:, 1:], "column"), (single.expand(rows, 1), "one value"))
    ]
    return [bool((result == 2).all()) for result in results] + [bool((whole[:, 0] == 1).all())]


@pytest.mark.parametrize("rows", [5, 4 * LARGE])
def test_views_can_be_donated(pool: RankPool, rows: int) -> None:
    assert pool.run(2, partial(reduce_views, rows=rows)) == [[True] * 3] * 2


def donate_alone(rank: int, backend: TorchBackend, rows: int) -> list[bool]:
    step = one("all-reduce", (rows, 1), Placement.grid((2,), ("x",)), (0,), "float32")
    shard = torch.ones(rows, 1)
    after = backend.communicator(rank).collective(
        step, shard, tag="t", deadline_s=30.0, donate=rank == 0
    )
    in_place = after.data_ptr() == shard.data_ptr()
    return [bool((after == 2).all()), in_place, bool((shard == 1).all())]


@pytest.mark.parametrize("rows", [5, 4 * LARGE])
def test_one_rank_may_donate_where_another_does_not(pool: RankPool, rows: int) -> None:
    donated, kept = pool.run(2, partial(donate_alone, rows=rows))

    assert donated == [True, True, False]
    assert kept == [True, False, True]


def gather_in_both_ways(rank: int, backend: TorchBackend) -> list[float]:
    mesh = Placement.grid((3,), ("x",))
    rows = group_limits._REPEATED_BYTES // 4
    sums = []
    for extent in (5, rows + 1):
        step = one("all-gather", (extent, 1), mesh, (0,), "float32")
        shard = torch.full((len(values(step, rank)), 1), float(rank))
        whole = backend.communicator(rank).collective(step, shard, tag="g", deadline_s=30.0)
        sums.append(whole.double().sum().item() / extent)
    return sums


def test_small_and_large_parts_are_gathered_from_three_ranks(pool: RankPool) -> None:
    rows = group_limits._REPEATED_BYTES // 4 + 1
    second, third = (rows - rows // 3) // 2, rows // 3
    expected = [(2 * 1 + 1 * 2) / 5, (second + 2 * third) / rows]

    for sums in pool.run(3, gather_in_both_ways):
        assert sums == pytest.approx(expected)


def native_parts(rank: int, backend: TorchBackend, path: str) -> list[list[float]]:
    """What NCCL is given for parts of one size, given to gloo."""
    limit = timedelta(seconds=30)
    store: Any = dist.FileStore(path, 2)
    group = gloo_group(store, rank, 2, limit)
    gathered, reduced = torch.empty(4), torch.empty(2)
    part = torch.tensor([1.0, 2.0]) + rank
    all_gather_parts(group, gathered, part, limit).wait()
    largest = dist.ReduceOp.MAX
    reduce_scatter_parts(group, reduced, torch.arange(4.0) * (rank + 1), largest, limit).wait()
    return [gathered.tolist(), reduced.tolist()]


def test_native_collectives_on_parts_of_one_size_put_them_in_order(
    pool: RankPool, tmp_path: Path
) -> None:
    first, second = pool.run(2, partial(native_parts, path=str(tmp_path / "store")))

    assert first == [[1.0, 2.0, 2.0, 3.0], [0.0, 2.0]]
    assert second == [[1.0, 2.0, 2.0, 3.0], [4.0, 6.0]]
