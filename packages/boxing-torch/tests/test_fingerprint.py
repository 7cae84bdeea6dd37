"""Fingerprints over torch.distributed: both sides of a mismatch are named on both."""

from functools import partial

import pytest
import torch
from rank_pool import RankPool

from sbp_boxing_torch.backend import TorchBackend
from sbp_core.boxing.processes.agree import agree
from sbp_core.boxing.processes.fingerprint import FingerprintedCommunicator
from sbp_core.boxing.router import route
from sbp_core.boxing.step import Step
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp


def one_step(
    before: Sbp, after: Sbp, sources: list[int], targets: list[int], dtype: str = "float32"
) -> Step:
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), dtype, (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def differ(rank: int, backend: TorchBackend, other: str) -> str:
    """Rank 0 reduces; rank 1 does what `other` says. Return the error."""
    end = FingerprintedCommunicator(backend, backend.communicator(rank))
    step, shard, tag = one_step(P, B, [0, 1], [0, 1]), torch.ones(4, 2), "gradients"
    end.collective(step, shard, tag="first", deadline_s=30.0)
    if rank == 1 and other == "tag":
        tag = "loss"
    elif rank == 1 and other == "dtype":
        step, shard = one_step(P, B, [0, 1], [0, 1], "float64"), torch.ones(4, 2).double()
    elif rank == 1 and other == "kind":
        step, shard = one_step(S(0), B, [0, 1], [0, 1]), torch.ones(2, 2)
    with pytest.raises(BoxingError) as caught:
        end.collective(step, shard, tag=tag, deadline_s=30.0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "sign"), [("tag", "'loss'"), ("dtype", "float64[4, 2]"), ("kind", "all-gather")]
)
def test_both_sides_of_a_mismatch_are_named_on_both(pool: RankPool, other: str, sign: str) -> None:
    for text in pool.run(2, partial(differ, other=other)):
        assert "ranks 0, 1 meet for different boxing steps" in text
        assert "rank 0: 'gradients', all-reduce" in text and "float32[4, 2]" in text
        assert "rank 1: " in text and sign in text and "call 1 of the group" in text


def send_another_dtype(rank: int, backend: TorchBackend) -> str:
    end = FingerprintedCommunicator(backend, backend.communicator(rank))
    if rank == 0:
        step = one_step(B, B, [0], [1])
        end.send(step, torch.ones(4, 2), tag="activations", deadline_s=30.0)
        with pytest.raises(BoxingError) as caught:
            end.receive(one_step(B, B, [1], [0]), None, tag="gradients", deadline_s=30.0)
    else:
        step = one_step(B, B, [0], [1], "int32")
        with pytest.raises(BoxingError) as caught:
            end.receive(step, None, tag="activations", deadline_s=30.0)
    return str(caught.value)


def test_a_message_of_another_kind_is_refused_by_its_receiver_and_its_sender_hears(
    pool: RankPool,
) -> None:
    for text in pool.run(2, send_another_dtype):
        assert "ranks 0, 1 meet for different boxing steps" in text
        assert "rank 0: 'activations', transfer" in text and "float32[4, 2]" in text
        assert "rank 1: 'activations', transfer" in text and "int32[4, 2]" in text


def exchange_well(rank: int, backend: TorchBackend) -> list[float]:
    end = FingerprintedCommunicator(backend, backend.communicator(rank))
    agree(end, [0, 1], "plan", "a1b2", 30.0)
    out, back = one_step(B, B, [rank], [1 - rank]), one_step(B, B, [1 - rank], [rank])
    for number in range(4):
        values = torch.full((4, 2), float(number))
        end.send(out, values, tag=f"message {number}", deadline_s=30.0)
    return [
        end.receive(back, None, tag=f"message {number}", deadline_s=30.0).mean().item()
        for number in (2, 0, 3, 1)
    ]


def test_messages_that_match_arrive_in_any_order(pool: RankPool) -> None:
    assert pool.run(2, exchange_well) == [[2.0, 0.0, 3.0, 1.0]] * 2


def have_another_plan(rank: int, backend: TorchBackend) -> str:
    with pytest.raises(BoxingError) as caught:
        agree(backend.communicator(rank), [0, 1, 2], "plan", "c3d4" if rank == 2 else "a1b2", 30.0)
    return str(caught.value)


def test_ranks_with_different_plans_are_named_on_all(pool: RankPool) -> None:
    for text in pool.run(3, have_another_plan):
        assert "values of plan: ranks 0, 1 have a1b2, rank 2 has c3d4" in text
