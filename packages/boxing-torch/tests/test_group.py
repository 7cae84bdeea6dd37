"""Groups: how parts travel, over gloo here, and over NCCL where there is a GPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sbp_boxing_torch.group import _REPEATED_BYTES, TorchGroup, connect


def connected(num_ranks: int) -> list[TorchGroup]:
    """Connect groups whose ranks are threads."""
    store: Any = dist.HashStore()
    ranks = tuple(range(num_ranks))
    with ThreadPoolExecutor(num_ranks) as threads:
        made = [threads.submit(connect, "gloo", ranks, rank, store, 30.0) for rank in ranks]
        return [group.result() for group in made]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("largest", [5, _REPEATED_BYTES // 4])
def test_parts_of_any_size_arrive_where_they_belong(num_ranks: int, largest: int) -> None:
    groups = connected(num_ranks)
    sizes = [largest, 0, 2, 1][:num_ranks]
    parts = [torch.full((size,), float(rank)) for rank, size in enumerate(sizes)]
    results = [torch.full((sum(sizes),), -1.0) for _ in groups]

    works = [
        (group, work)
        for group, part, result in zip(groups, parts, results, strict=True)
        for work in group.all_gather(result, part, sizes)
    ]

    assert all(group.wait(work, 30.0) for group, work in works)
    for rank, result in enumerate(results):
        for sender, chunk in enumerate(result.split(sizes)):
            assert sender == rank or torch.equal(chunk, parts[sender])


def test_large_parts_are_not_copied_before_they_are_sent() -> None:
    groups, size = connected(3), _REPEATED_BYTES
    part = torch.zeros(size)
    results = [torch.empty(3 * size) for _ in groups]

    works = [groups[0].all_gather(results[0], part, [size] * 3)]
    part.fill_(7.0)  # the others have not come, so that nothing has left
    works += [
        group.all_gather(result, torch.zeros(size), [size] * 3)
        for group, result in zip(groups[1:], results[1:], strict=True)
    ]

    assert all(
        group.wait(work, 30.0) for group, some in zip(groups, works, strict=True) for work in some
    )
    assert results[1][0].item() == results[2][size - 1].item() == 7.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible")
def test_a_group_of_one_rank_runs_every_collective_over_nccl() -> None:
    store: Any = dist.HashStore()
    group = connect("nccl", (0,), 0, store, 60.0)
    part = torch.arange(4.0, device="cuda:0")
    total, gathered, reduced, moved = (part.clone(), *torch.zeros(3, 4, device="cuda:0"))

    works = [
        group.all_reduce(total, "sum"),
        *group.all_gather(gathered, part, [4]),
        group.reduce_scatter(reduced, part, "max"),
        group.exchange(moved, part, [4], [4]),
    ]

    assert all(group.wait(work, 60.0) for work in works)
    for result in (total, gathered, reduced, moved):
        assert torch.equal(result, part)
    group.abort()
