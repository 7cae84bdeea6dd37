"""Every way of running the program equals the one-device program, on every rank's shard."""

from __future__ import annotations

import pytest
import torch
from programs import (
    CASES,
    Case,
    ParallelRun,
    make_plan,
    make_strategy,
    one_device,
    run,
    same_bits,
    worst_shard,
)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float64_losses_and_shards_equal_the_one_device_program(case: Case) -> None:
    truth = one_device(torch.float64, case.batch_size)

    found = run(case, torch.float64, "actor")

    losses = [abs(a.item() - b) for a, b in zip(found.losses, truth.losses, strict=True)]
    assert max(losses) <= 1e-9
    assert worst_shard(make_plan(case, torch.float64), found, truth) <= 1e-9


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32_losses_equal_the_one_device_program(case: Case) -> None:
    truth = one_device(torch.float32, case.batch_size)

    found = run(case, torch.float32, "actor")

    relative = [abs(a.item() - b) / abs(b) for a, b in zip(found.losses, truth.losses, strict=True)]
    assert max(relative) <= 1e-5


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_runtimes_and_repetitions_agree_bit_for_bit(case: Case) -> None:
    reference = run(case, torch.float32, "reference")

    first = run(case, torch.float32, "actor")
    again = run(case, torch.float32, "actor", repetition=1)
    overlapped = run(case, torch.float32, "actor", boxing_thread=True)

    for other in (first, again, overlapped):
        assert_same(reference, other)


def assert_same(one: ParallelRun, other: ParallelRun) -> None:
    assert all(map(same_bits, one.losses, other.losses))
    assert one.shards.keys() == other.shards.keys()
    for key, value in one.shards.items():
        assert same_bits(value, other.shards[key]), key


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_moved_are_the_bytes_predicted(case: Case) -> None:
    found = run(case, torch.float32, "actor")

    plan = make_plan(case, torch.float32)
    assert found.sent_bytes == len(found.losses) * plan.boxing_bytes
    assert plan.boxing_bytes == make_strategy(case, torch.float32).report["predicted_boxing_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_osdp_shards_some_parameters_and_replicates_others(dtype: torch.dtype) -> None:
    case = next(case for case in CASES if case.planner == "osdp")

    strategy = make_strategy(case, dtype)

    modes = set(strategy.report["osdp"]["modes"].values())
    assert modes == {"DP", "ZDP"}
