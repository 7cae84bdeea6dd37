"""Collectives among threads: blocks, whoever does them, come to what one rank alone would make."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sbp_core.boxing.router import route
from sbp_core.boxing.step import BoxingStep
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_torch.boxing import share as module
from sbp_torch.boxing.buffer_pool import BufferPool
from sbp_torch.boxing.execute import apply_step, shard
from sbp_torch.boxing.share import SharedStep, share_out

EVEN, UNEVEN = (512, 768), (509, 771)


def one_step(source: str, target: str, shape: tuple[int, ...], num_ranks: int = 3) -> BoxingStep:
    mesh = Placement.grid((num_ranks,), ("x",))
    before, after = (mesh, NdSbp.parse(source)), (mesh, NdSbp.parse(target))
    (step,) = route(shape, "float32", before, after).steps
    return step


def random_shards(step: BoxingStep) -> dict[int, torch.Tensor]:
    parts = shard(torch.zeros(step.shape), *step.source)
    torch.manual_seed(0)
    return {rank: torch.randn(part.shape) for rank, part in parts.items()}


def finish(work: SharedStep, num_threads: int) -> dict[int, torch.Tensor]:
    with ThreadPoolExecutor(num_threads) as threads:
        done = [threads.submit(work.do) for _ in range(num_threads)]
        assert sum(count.result() for count in done) == work.num_blocks
    return work.results


@pytest.mark.parametrize("shape", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("source", "target"),
    [("P", "B"), ("P(max)", "B"), ("P", "S(0)"), ("P(min)", "S(1)"), ("S(0)", "B"), ("S(1)", "B"),
     ("S(0)", "S(1)"), ("S(1)", "S(0)")],
)  # fmt: skip
@pytest.mark.parametrize("block_bytes", [1000, module._BLOCK_BYTES])
def test_blocks_make_bit_for_bit_what_one_rank_makes(
    monkeypatch, source: str, target: str, shape: tuple[int, ...], block_bytes: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
    step = one_step(source, target, shape)
    shards = random_shards(step)
    kept = {rank: part.clone() for rank, part in shards.items()}

    work = share_out(step, (0, 1, 2), shards, [], BufferPool())

    assert work.num_blocks > 0
    made, expected = finish(work, 3), apply_step(step, kept)
    for rank in range(3):
        assert torch.equal(made[rank], expected[rank])
        assert made[rank].is_contiguous()
        assert torch.equal(shards[rank], kept[rank])


def test_small_tensors_are_done_at_once() -> None:
    step = one_step("P", "B", (4, 6))
    shards = random_shards(step)

    work = share_out(step, (0, 1, 2), shards, [], BufferPool())

    assert work.num_blocks == 0
    assert torch.equal(work.results[2], shards[0] + shards[1] + shards[2])


def test_only_large_tensors_are_worth_the_help_of_others() -> None:
    for rows, needs_help in ((400, False), (2048, True)):
        step = one_step("P", "B", (rows, 768))

        work = share_out(step, (0, 1, 2), random_shards(step), [], BufferPool())

        assert work.num_blocks > 1
        assert work.needs_help == needs_help


def test_empty_shards_make_no_blocks() -> None:
    step = one_step("S(0)", "S(1)", (2, 70_000))
    shards = random_shards(step)
    assert shards[2].numel() == 0

    made = finish(share_out(step, (0, 1, 2), shards, [], BufferPool()), 2)

    expected = apply_step(step, shards)
    assert all(torch.equal(made[rank], expected[rank]) for rank in range(3))


@pytest.mark.parametrize("donor", [0, 1, 2])
def test_a_donated_shard_becomes_the_sum_of_all_and_no_other_is_touched(donor: int) -> None:
    step = one_step("P", "B", UNEVEN)
    shards = random_shards(step)
    kept = {rank: part.clone() for rank, part in shards.items()}

    made = finish(share_out(step, (0, 1, 2), shards, [donor], BufferPool()), 3)

    assert all(part is shards[donor] for part in made.values())
    assert torch.equal(made[0], (kept[0] + kept[1]) + kept[2])
    assert all(torch.equal(shards[rank], kept[rank]) for rank in range(3) if rank != donor)


def test_a_donated_shard_with_gaps_is_left_alone() -> None:
    step = one_step("P", "B", EVEN, 2)
    wide = torch.randn(512, 1536)
    shards = {0: wide[:, ::2], 1: torch.randn(EVEN)}
    expected = shards[0] + shards[1]

    made = finish(share_out(step, (0, 1), shards, [0], BufferPool()), 2)

    assert torch.equal(made[1], expected)
    assert not torch.equal(shards[0], expected)


def test_a_shard_of_the_wrong_dtype_is_refused() -> None:
    step = one_step("P", "B", EVEN)
    shards = random_shards(step)
    shards[1] = shards[1].double()

    with pytest.raises(BoxingError, match=r"rank 1 gives a shard of shape .* torch.float64"):
        share_out(step, (0, 1, 2), shards, [], BufferPool())
