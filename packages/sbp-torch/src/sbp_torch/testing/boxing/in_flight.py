"""Programs that have several boxing steps in flight at once, for the boxing conformance suite."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sbp_core.boxing import StepKind
from sbp_torch.testing.boxing.conversion_cases import BoxingCase
from sbp_torch.testing.boxing.convert import BoxingTrial
from sbp_torch.testing.boxing.failures import Told, catch, ones, sum_over
from sbp_torch.testing.boxing.values import source_shard, target_shard

if TYPE_CHECKING:
    from sbp_core.boxing import Communicator, Pending

#: Orders in which a rank waits for the steps that it has begun.
ORDERS = ("as begun", "last first", "one way on even ranks, the other on odd ones")


def can_be_in_flight(case: BoxingCase) -> bool:
    """Whether a case is one step between ranks whose result each rank can check by itself."""
    steps = case.route.steps
    return (
        len(steps) == 1 and steps[0].kind is not StepKind.LOCAL and not case.target[1].has_partial
    )


def convert_together(
    rank: int,
    communicator: Communicator,
    *,
    trials: Sequence[BoxingTrial],
    order: str,
    deadline_s: float,
    device: str,
) -> tuple[list[str], int]:
    """Begin the step of every trial, then wait for all of them.

    Returns:
        A line for each problem; and the bytes that the rank sent.
    """
    before = communicator.sent_bytes
    begun: list[tuple[BoxingTrial, Pending, torch.Tensor | None, torch.Tensor | None]] = []
    for number, trial in enumerate(trials):
        (step,), tag = trial.route.steps, f"case {number}"
        shard = source_shard(trial.case, rank)
        shard = None if shard is None else shard.to(device)
        kept = None if shard is None else shard.clone()
        if step.kind is StepKind.TRANSFER:
            if rank in step.target[0]:
                pending = communicator.begin_receive(step, shard, tag=tag, deadline_s=deadline_s)
                begun.append((trial, pending, shard, kept))
            if rank in step.source[0]:
                assert shard is not None, "a source rank starts with a shard"
                communicator.send(step, shard, tag=tag, deadline_s=deadline_s)
        elif shard is not None:
            pending = communicator.begin(
                step, shard, tag=tag, deadline_s=deadline_s, donate=trial.donate
            )
            begun.append((trial, pending, None if trial.donate else shard, kept))
        communicator.progress()
    if order == ORDERS[1] or (order == ORDERS[2] and rank % 2):
        begun.reverse()
    problems: list[str] = []
    for trial, pending, shard, kept in begun:
        result = pending.wait()
        if shard is not None and kept is not None and not torch.equal(shard, kept):
            problems.append(f"rank {rank}: its input was changed\n  {trial}")
        if not torch.equal(result.cpu(), target_shard(trial.case, rank)):
            problems.append(f"rank {rank}: it holds wrong values\n  {trial}")
    return problems, communicator.sent_bytes - before


def compute_while_others_wait(
    rank: int,
    communicator: Communicator,
    *,
    deadline_s: float,
    waits_s: float,
    device: str,
) -> Told:
    """Sum over three ranks: 0 waits, 1 never takes part, 2 begins and then computes for long."""
    step, values = sum_over(0, 1, 2), ones(device)
    communicator.collective(step, values, tag="found", deadline_s=deadline_s)
    if rank == 1:
        time.sleep(2 * waits_s)
        return "", 0.0

    def begin_and_wait() -> None:
        pending = communicator.begin(step, values, tag="lost", deadline_s=waits_s)
        if rank == 2:
            time.sleep(1.5 * waits_s)
        pending.wait()

    return catch(begin_and_wait)
