"""Test conversions between tensor layouts by a boxing backend: the program of a rank, the checks.

`BoxingConformance` runs `run_trials` on each rank, which checks its own shards. Partial values can
only be checked together, so they are returned, and `find_problems` checks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sbp_core.boxing import Route, StepKind
from sbp_core.errors import BoxingError
from sbp_torch.boxing.execute import local_step
from sbp_torch.testing.boxing.conversion_cases import BoxingCase
from sbp_torch.testing.boxing.values import (
    gather,
    logical_tensor,
    source_shard,
    target_shape,
    target_shard,
)

if TYPE_CHECKING:
    from sbp_core.boxing import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxingTrial:
    """One case, and the options of its run.

    Args:
        case: The conversion.
        route: The steps of the conversion; equal on all ranks.
        donate: Whether shards are donated to collectives.
        strided: Whether shards have gaps between their elements in memory.
        tracked: Whether shards require gradients, if their dtype can.
    """

    case: BoxingCase
    route: Route
    donate: bool
    strided: bool
    tracked: bool

    def __str__(self) -> str:
        manner = [word for word in ("donate", "strided", "tracked") if getattr(self, word)]
        return " ".join([*(f"[{word}]" for word in manner), str(self.case)])


@dataclass(slots=True, kw_only=True)
class TrialResult:
    """The result of one rank in one trial.

    Args:
        sent_bytes: Bytes that it sent in each step.
        problem: Description of the problem on this rank; empty if there is none.
        values: Its flat shard, if the target has partial values and includes this rank.
    """

    sent_bytes: list[int] = field(default_factory=list)
    problem: str = ""
    values: list[Any] | None = None


def make_trials(cases: Sequence[BoxingCase]) -> tuple[BoxingTrial, ...]:
    """Return a trial for each case, with its route and varied options."""
    return tuple(
        BoxingTrial(
            case=case,
            route=case.route,
            donate=number % 2 == 1,
            strided=number % 3 == 2,
            tracked=number % 5 == 3,
        )
        for number, case in enumerate(cases)
    )


def run_trials(
    rank: int,
    communicator: Communicator,
    *,
    trials: tuple[BoxingTrial, ...],
    deadline_s: float,
    device: str = "cpu",
) -> list[TrialResult]:
    """Convert every case in order, on one rank: the program that the suite passes to `run_ranks`.

    It stops at the first step that raises, because the backend is broken then.
    """
    answers: list[TrialResult] = []
    for number, trial in enumerate(trials):
        answer = TrialResult()
        answers.append(answer)
        shard = source_shard(trial.case, rank)
        if shard is not None:
            shard = _laid_out(shard.to(device), trial.strided)
            shard.requires_grad_(trial.tracked and shard.is_floating_point())
        kept = None if shard is None else shard.detach().clone()
        try:
            result = run_route(
                rank,
                communicator,
                trial.route,
                shard,
                tag=f"case {number}",
                deadline_s=deadline_s,
                donate=trial.donate,
                sent_bytes=answer.sent_bytes,
            )
        except BoxingError as error:
            answer.problem = f"raised {error}"
            break
        if shard is not None and kept is not None and not torch.equal(shard, kept):
            answer.problem = "its input was changed"
        else:
            _judge(rank, trial.case, result, answer)
    return answers


def _laid_out(shard: torch.Tensor, strided: bool) -> torch.Tensor:
    """Return the shard, or an equal view of every second element of a larger tensor."""
    return torch.stack((shard, shard), -1)[..., 0] if strided else shard


def _judge(rank: int, case: BoxingCase, result: torch.Tensor | None, answer: TrialResult) -> None:
    """Check the result of a rank; record the problem, or the values to check together."""
    placement, sbp = case.target
    if rank not in placement:
        answer.problem = "" if result is None else "it holds a shard that it should not hold"
        return
    shape, dtype = target_shape(case, rank), getattr(torch, case.dtype)
    if result is None:
        answer.problem = "it holds no shard"
    elif tuple(result.shape) != shape or result.dtype != dtype:
        answer.problem = f"it holds {result.dtype}{list(result.shape)} and not {list(shape)}"
    elif result.requires_grad:
        answer.problem = "it holds a shard that asks for gradients"
    elif sbp.has_partial:
        answer.values = result.cpu().flatten().tolist()
    elif not torch.equal(result.cpu(), expected := target_shard(case, rank)):
        answer.problem = f"it holds wrong values: {_difference(result.cpu(), expected)}"


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return a description of the difference of two tensors of one shape."""
    places = (found != expected).nonzero().tolist()
    first = tuple(places[0])
    return (
        f"{len(places)} of {expected.numel()} differ, the first at {first}: "
        f"{found[first].item()} and not {expected[first].item()}"
    )


def run_route(
    rank: int,
    communicator: Communicator,
    route: Route,
    shard: torch.Tensor | None,
    *,
    tag: str,
    deadline_s: float,
    donate: bool = False,
    sent_bytes: list[int] | None = None,
) -> torch.Tensor | None:
    """Convert one rank's shard along a route.

    Args:
        rank: The rank that calls.
        communicator: Its communicator.
        route: The route; equal on all ranks.
        shard: The rank's part under `route.source`; None on a rank outside the source placement.
        tag: Prefix of the tags of the steps; equal on all ranks.
        deadline_s: Seconds that each step may wait for other ranks.
        donate: Whether each collective gets a new copy, as a donation.
        sent_bytes: List to which the bytes that the rank sent in each step are appended.

    Returns:
        The rank's part under `route.target`; None on a rank outside the target placement.
    """
    for number, step in enumerate(route.steps):
        name, before = f"{tag}, step {number}", communicator.sent_bytes
        if step.kind is StepKind.TRANSFER:
            if rank in step.source[0]:
                assert shard is not None, "a source rank starts with a shard"
                communicator.send(step, shard, tag=name, deadline_s=deadline_s)
            if rank in step.target[0]:
                shard = communicator.receive(step, shard, tag=name, deadline_s=deadline_s)
            else:
                shard = None
        elif rank in step.source[0]:
            assert shard is not None, "a rank of the mesh holds a shard"
            if step.kind is StepKind.LOCAL:
                shard = local_step(step, rank, shard)
            else:
                given = shard.clone() if donate else shard
                shard = communicator.collective(
                    step, given, tag=name, deadline_s=deadline_s, donate=donate
                )
        if sent_bytes is not None:
            sent_bytes.append(communicator.sent_bytes - before)
    return shard if rank in route.target[0] else None


def find_problems(
    trials: Sequence[BoxingTrial], answers: Sequence[Sequence[TrialResult]]
) -> list[str]:
    """Return the problems, each with its case.

    Args:
        trials: The trials that were run.
        answers: The results of `run_trials` of each rank, in rank order.
    """
    found: list[str] = []
    for number, trial in enumerate(trials):
        given = [answer[number] for answer in answers if number < len(answer)]
        wrong = [
            f"rank {rank}: {answer.problem}" for rank, answer in enumerate(given) if answer.problem
        ]
        if not wrong and len(given) == len(answers):
            wrong = [*_wrong_bytes(trial, given), *_wrong_whole(trial, given)]
        if wrong or len(given) < len(answers):
            found.append("\n  ".join([*(wrong or ["a rank stopped before this"]), str(trial)]))
        if len(given) < len(answers) or any("raised" in line for line in wrong):
            break
    return found


def _wrong_bytes(trial: BoxingTrial, answers: Sequence[TrialResult]) -> list[str]:
    """Compare the counted bytes with the predicted bytes of each step."""
    return [
        f"step {number}: {sent} bytes sent, {step.size_bytes} predicted"
        for number, step in enumerate(trial.route.steps)
        if (sent := sum(answer.sent_bytes[number] for answer in answers)) != step.size_bytes
    ]


def _wrong_whole(trial: BoxingTrial, answers: Sequence[TrialResult]) -> list[str]:
    """Join partial values and compare the result with the logical tensor."""
    case = trial.case
    placement, sbp = case.target
    if not sbp.has_partial:
        return []
    logical = logical_tensor(case)
    shards = {
        at: torch.tensor(answers[rank].values, dtype=logical.dtype).reshape(
            target_shape(case, rank)
        )
        for rank, at in placement.coordinates()
    }
    try:
        whole = gather(shards, sbp, placement.mesh_shape)
    except AssertionError as error:
        return [str(error)]
    if torch.equal(whole, logical):
        return []
    return [f"the shards make another tensor: {_difference(whole, logical)}"]
