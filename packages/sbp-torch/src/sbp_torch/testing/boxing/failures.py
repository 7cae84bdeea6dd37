"""Programs of ranks in which communication fails on purpose, for the boxing conformance suite.

They return the error messages, which the suite checks. Functions that take a backend are jobs
(`run_backends`), functions that take a communicator are programs (`run_ranks`).
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sbp_core.boxing import BoxingStep, bounds_of, route
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp
from sbp_core.testing.holdings import grown, holdings

if TYPE_CHECKING:
    from sbp_core.boxing import BoxingBackend, Communicator

#: Shape of every tensor here.
SHAPE = (4, 2)

#: Error message of a rank that fails.
REASON = "loss is not a number"

#: Error message of a rank (empty: the call succeeded), and duration of the call in seconds.
Told = tuple[str, float]


def one_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> BoxingStep:
    """Return the only step that converts a float32 tensor from one 1-D placement to the other."""
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route(SHAPE, "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def sum_over(*ranks: int) -> BoxingStep:
    """Return the all-reduce among some ranks."""
    return one_step(P, B, list(ranks), list(ranks))


def message(sender: int, receiver: int) -> BoxingStep:
    """Return the step that sends a whole tensor from one rank to another."""
    return one_step(B, B, [sender], [receiver])


def catch(call: Callable[[], object]) -> Told:
    """Return the message of the `BoxingError` that a call raises, and the duration of the call."""
    start, said = time.monotonic(), ""
    try:
        call()
    except BoxingError as error:
        said = str(error)
    return said, time.monotonic() - start


def ones(device: str) -> torch.Tensor:
    """Return a tensor of `SHAPE`."""
    return torch.ones(SHAPE, device=device)


def miss_a_sum(
    rank: int,
    communicator: Communicator,
    *,
    missing: int,
    met_before: bool,
    deadline_s: float,
    waits_s: float,
    device: str,
) -> Told:
    """Sum over three ranks without rank `missing`; if `met_before`, after a sum of all ranks."""
    step, values = sum_over(0, 1, 2), ones(device)
    if met_before:
        communicator.collective(step, values, tag="found", deadline_s=deadline_s)
    if rank == missing:
        time.sleep(2 * waits_s)
        return "", 0.0
    return catch(partial(communicator.collective, step, values, tag="lost", deadline_s=waits_s))


def miss_a_message(rank: int, communicator: Communicator, *, waits_s: float, device: str) -> Told:
    """Receive a message on rank 1 that rank 0 never sends."""
    if rank == 0:
        time.sleep(2 * waits_s)
        return "", 0.0
    return catch(partial(communicator.receive, message(0, 1), None, tag="lost", deadline_s=waits_s))


def await_delivery(
    rank: int, communicator: Communicator, *, deadline_s: float, device: str
) -> float:
    """Exchange messages of two ranks. Rank 1 begins to receive before it sends, rank 0 after it."""
    out, back = message(rank, 1 - rank), message(1 - rank, rank)
    begin_receive = partial(
        communicator.begin_receive, back, None, tag="found", deadline_s=deadline_s
    )
    asked = begin_receive() if rank else None
    delivery = communicator.send(out, ones(device), tag="found", deadline_s=deadline_s)
    if rank:
        delivery.wait()
    total = float((asked or begin_receive()).wait().sum())
    delivery.wait()
    return total


def miss_a_delivery(rank: int, communicator: Communicator, *, waits_s: float, device: str) -> Told:
    """Send a message to rank 1, which does not receive it, and wait for the delivery."""
    if rank == 1:
        time.sleep(2 * waits_s)
        return "", 0.0
    step, values = message(0, 1), ones(device)
    return catch(lambda: communicator.send(step, values, tag="lost", deadline_s=waits_s).wait())


def miss_messages(rank: int, communicator: Communicator, *, waits_s: float, device: str) -> Told:
    """Receive on rank 3 the parts of ranks 0, 1 and 2, of which only rank 1 sends its part."""
    step = one_step(S(0), B, [0, 1, 2], [3])
    if rank == 1:
        bounds = bounds_of(step.shape, *step.source)[rank]
        part = ones(device)[slice(*bounds[0])]
        communicator.send(step, part, tag="lost", deadline_s=10 * waits_s)
    if rank != 3:
        time.sleep(2 * waits_s)
        return "", 0.0
    return catch(partial(communicator.receive, step, None, tag="lost", deadline_s=waits_s))


def give_wrong_shard(
    rank: int, communicator: Communicator, *, deadline_s: float, device: str
) -> tuple[str, bool]:
    """Pass a shard of another shape, then the right one.

    Returns:
        The error message of the first call, and whether the second result is right.
    """
    call = partial(communicator.collective, sum_over(0, 1), tag="odd", deadline_s=deadline_s)
    said, _ = catch(partial(call, ones(device).reshape(2, 4)))
    return said, torch.equal(call(ones(device)), 2 * ones(device))


def exchange_many(
    rank: int, communicator: Communicator, *, deadline_s: float, device: str
) -> list[float]:
    """Send ten messages to the other of two ranks; then receive its ten, the last one first."""
    out, back = message(rank, 1 - rank), message(1 - rank, rank)
    for number in range(10):
        values = (10 * rank + number) * ones(device)
        communicator.send(out, values, tag=f"message {number}", deadline_s=deadline_s)
    return [
        communicator.receive(back, None, tag=f"message {number}", deadline_s=deadline_s)
        .mean()
        .item()
        for number in reversed(range(10))
    ]


def send_and_go(rank: int, communicator: Communicator, *, deadline_s: float, device: str) -> float:
    """Send a message to rank 1, and return long before it receives the message."""
    if rank == 0:
        communicator.send(message(0, 1), ones(device), tag="last words", deadline_s=deadline_s)
        return 0.0
    time.sleep(0.5)
    received = communicator.receive(message(0, 1), None, tag="last words", deadline_s=deadline_s)
    return float(received.sum())


def fail_while_waiting(
    rank: int,
    backend: BoxingBackend,
    *,
    met_before: bool,
    deadline_s: float,
    device: str,
) -> Told:
    """Wait on two ranks for different steps that never complete, while rank 0 fails.

    Rank 1 begins to receive its message some time before it waits for it.
    """
    communicator = backend.communicator(rank)
    if met_before:
        communicator.collective(sum_over(0, 1), ones(device), tag="met", deadline_s=deadline_s)
    if rank == 1:
        pending = communicator.begin_receive(
            message(0, 1), None, tag="elsewhere", deadline_s=deadline_s
        )
        time.sleep(0.1)
        return catch(pending.wait)
    timer = threading.Timer(0.3, backend.fail, (ArithmeticError(REASON),))
    timer.start()
    answer = catch(
        partial(
            communicator.collective,
            sum_over(0, 1),
            ones(device),
            tag="here",
            deadline_s=deadline_s,
        )
    )
    timer.join()
    return answer


def use_after_the_end(
    rank: int, backend: BoxingBackend, *, deadline_s: float, device: str
) -> list[Any]:
    """Sum, close the backend twice, and then try three calls; return their error messages."""
    communicator = backend.communicator(rank)
    communicator.collective(sum_over(0, 1), ones(device), tag="good", deadline_s=deadline_s)
    # If ranks share a backend, the first rank might close it while other ranks still use it.
    time.sleep(0.2)
    backend.close()
    backend.close()
    there, back = message(rank, 1 - rank), message(1 - rank, rank)
    return [
        catch(partial(call, tag="late", deadline_s=deadline_s))
        for call in (
            partial(communicator.collective, sum_over(0, 1), ones(device)),
            partial(communicator.send, there, ones(device)),
            partial(communicator.receive, back, None),
        )
    ]


def hold_after_the_end(
    rank: int,
    backend: BoxingBackend,
    *,
    before: Mapping[int, Counter[str]],
    settle_s: float,
    grace_s: float,
    deadline_s: float,
    device: str,
) -> tuple[int, Counter[str]]:
    """Sum, send, close the backend; return the process id, and the resources that are still held.

    It also begins a sum without waiting for it.

    Args:
        rank: This rank.
        backend: Its backend.
        before: Process id -> resources that were held after an earlier backend.
        settle_s: Seconds for other ranks of this process to close their backends.
        grace_s: Further seconds until there may not be more resources than before.
        deadline_s: Seconds that a step may take.
        device: Device of the shards.
    """
    communicator = backend.communicator(rank)
    communicator.collective(sum_over(0, 1), ones(device), tag="sum", deadline_s=deadline_s)
    communicator.begin(sum_over(0, 1), ones(device), tag="for nobody", deadline_s=deadline_s)
    out, back = message(rank, 1 - rank), message(1 - rank, rank)
    communicator.send(out, ones(device), tag="message", deadline_s=deadline_s)
    communicator.receive(back, None, tag="message", deadline_s=deadline_s)
    # If ranks share a backend, the first rank might close it while other ranks still use it.
    time.sleep(0.2)
    backend.close()
    time.sleep(settle_s)
    process, end = os.getpid(), time.monotonic() + grace_s
    held = holdings()
    while process in before and grown(before[process], held) and time.monotonic() < end:
        time.sleep(0.05)
        held = holdings()
    return process, held


def ask_for_others(rank: int, backend: BoxingBackend) -> Told:
    """Request the communicator of a rank that does not exist; return the error."""
    return catch(partial(backend.communicator, 1000 + rank))
