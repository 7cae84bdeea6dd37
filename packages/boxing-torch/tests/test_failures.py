"""One rank of three comes down: every other rank learns it, and which one it was.

How soon is measured by `integration/kills`. Here calls have a deadline after which a test has given
up, except where a rank stalls.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from falling_ranks import Fall, bring_down

from sbp_boxing_torch.backend import TorchBackend
from sbp_core.boxing.router import route
from sbp_core.boxing.step import BoxingStep
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, Sbp

DEADLINE_S = 2.0


def one_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> BoxingStep:
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def live(
    rank: int, backend: TorchBackend, ready: Callable[[], Any], failing_rank: int, how: str
) -> None:
    """Reduce once; then one rank fails, one reduces, and one computes while it receives."""
    end, everyone = backend.communicator(rank), one_step(P, B, [0, 1, 2], [0, 1, 2])
    deadline_s = DEADLINE_S if how == "stop" else 600.0
    end.collective(everyone, torch.ones(4, 2), tag="first", deadline_s=60.0)
    ready()
    if rank == failing_rank:
        fall(how, backend)
    if rank == min({0, 1, 2} - {failing_rank}):
        end.collective(everyone, torch.ones(4, 2), tag="gradients", deadline_s=deadline_s)
    step = one_step(B, B, [failing_rank], [rank])
    under_way = end.begin_receive(step, None, tag="activations", deadline_s=deadline_s)
    time.sleep(0.5)
    under_way.wait()


def fall(how: str, backend: TorchBackend) -> None:
    if how == "raise":
        raise ValueError("loss is not a number")
    if how == "exit":
        sys.exit(3)
    if how == "close":
        backend.close()
    time.sleep(120)  # until it is killed


def send(number: signal.Signals, process: int) -> None:
    os.kill(process, number)


def falls(how: str, failing_rank: int, *, hosted: bool = False) -> tuple[Fall, Fall]:
    """Return how the rank that reduces, and the one that computes and receives, came down."""
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    blow = partial(send, signals[how]) if how in signals else None
    found = bring_down(
        3,
        partial(live, failing_rank=failing_rank, how=how),
        blow,
        failing_rank=failing_rank,
        hosted=hosted,
    )
    first, second = sorted(found)
    assert "'gradients'" in found[first].error and f"rank {first}" in found[first].error
    assert "'activations'" in found[second].error and f"rank {second}" in found[second].error
    for one in found.values():
        assert one.code == 0
    return found[first], found[second]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failing_rank", "words"),
    [
        ("kill", 2, "has ended"),
        ("raise", 1, "reported: ValueError: loss is not a number"),
        pytest.param("exit", 2, "its program ended", marks=pytest.mark.exhaustive),
        pytest.param("close", 1, "has closed its boxing", marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_name_a_rank_that_ends(how: str, failing_rank: int, words: str) -> None:
    for one in falls(how, failing_rank):
        assert f"rank {failing_rank} " in one.error and words in one.error


@pytest.mark.slow
def test_the_others_name_a_rank_that_ends_and_takes_the_store_with_it() -> None:
    for one in falls("kill", 0, hosted=True):
        assert "rank 0 (pid " in one.error and "has ended" in one.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing_rank", "hosted"), [(2, False), pytest.param(0, True, marks=pytest.mark.exhaustive)]
)
def test_the_others_name_a_rank_that_stalls_at_their_deadline(
    failing_rank: int, hosted: bool
) -> None:
    for one in falls("stop", failing_rank, hosted=hosted):
        assert "did not arrive: " in one.error
        assert f"rank {failing_rank} (pid " in one.error and "is stopped by a signal" in one.error
