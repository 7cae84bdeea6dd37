"""Programs of ranks that disagree on a step, a message or a plan, for the boxing conformance suite.

They return the error messages, which the suite checks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from sbp_core.boxing import BoxingStep, route
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_torch.boxing.processes.agreement import agree
from sbp_torch.boxing.processes.fingerprint import FingerprintedCommunicator
from sbp_torch.testing.boxing.failures import SHAPE, catch, message, sum_over

if TYPE_CHECKING:
    from sbp_core.boxing import BoxingBackend, Communicator

#: Difference between the steps of rank 0 and rank 1 -> text that the error has to contain.
MISMATCHES = {"tag": "'loss'", "dtype": "float64[4, 2]", "kind": "all-gather"}


def _only_step(before: str, after: str, dtype: str) -> BoxingStep:
    """Return the only step that converts a tensor on ranks 0 and 1."""
    mesh = Placement([0, 1], ("x",))
    ends = (mesh, NdSbp.parse(before)), (mesh, NdSbp.parse(after))
    (step,) = route(SHAPE, dtype, *ends).steps
    return step


def differ_in_a_collective(
    rank: int, backend: BoxingBackend, *, other: str, deadline_s: float, device: str
) -> str:
    """Run one sum, then a sum on rank 0 and, on rank 1, a step that differs in `other`.

    Returns:
        The error message of the second step.
    """
    end = FingerprintedCommunicator(backend, backend.communicator(rank))
    step, shard, tag = sum_over(0, 1), torch.ones(SHAPE, device=device), "gradients"
    end.collective(step, shard, tag="first", deadline_s=deadline_s)
    if rank == 1 and other == "tag":
        tag = "loss"
    elif rank == 1 and other == "dtype":
        step, shard = _only_step("P", "B", "float64"), shard.double()
    elif rank == 1 and other == "kind":
        step, shard = _only_step("S(0)", "B", "float32"), shard[:2]
    return catch(partial(end.collective, step, shard, tag=tag, deadline_s=deadline_s))[0]


def differ_in_a_message(
    rank: int, backend: BoxingBackend, *, deadline_s: float, device: str
) -> str:
    """Send float32 while rank 1 expects int32, then wait for rank 1; return the error message."""
    end = FingerprintedCommunicator(backend, backend.communicator(rank))
    if rank == 0:
        values = torch.ones(SHAPE, device=device)
        end.send(message(0, 1), values, tag="activations", deadline_s=deadline_s)
        call = partial(end.receive, message(1, 0), None, tag="gradients")
    else:
        ends = tuple((Placement([place], ("x",)), NdSbp.parse("B")) for place in (0, 1))
        (step,) = route(SHAPE, "int32", *ends).steps
        call = partial(end.receive, step, None, tag="activations")
    return catch(partial(call, deadline_s=deadline_s))[0]


def agree_on_messages(
    rank: int, backend: BoxingBackend, *, deadline_s: float, device: str
) -> list[float]:
    """Agree on a plan, send four messages each way, and receive them in another order."""
    end = FingerprintedCommunicator(backend, backend.communicator(rank))
    agree(end, [0, 1], "plan", "a1b2", deadline_s)
    for number in range(4):
        values = torch.full(SHAPE, float(number), device=device)
        end.send(message(rank, 1 - rank), values, tag=f"message {number}", deadline_s=deadline_s)
    back = message(1 - rank, rank)
    return [
        end.receive(back, None, tag=f"message {number}", deadline_s=deadline_s).mean().item()
        for number in (2, 0, 3, 1)
    ]


def have_another_plan(rank: int, communicator: Communicator, *, deadline_s: float) -> str:
    """Compare plans of three ranks, of which the last one differs; return the error message."""
    plan = "c3d4" if rank == 2 else "a1b2"
    return catch(partial(agree, communicator, [0, 1, 2], "plan", plan, deadline_s))[0]
