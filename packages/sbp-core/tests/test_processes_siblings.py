"""Real processes that one parent has started, each with a launcher's variables."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sbp_core.errors import BoxingError
from sbp_core.processes import Siblings

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
BY_HAND = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}


@contextmanager
def running(*ranks: int) -> Iterator[None]:
    """Start other ranks than 0, which is this process."""
    text = "import sys; sys.stdin.read()"
    started = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", text],
            stdin=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank)},
        )
        for rank in ranks
    ]
    try:
        yield
    finally:
        for one in started:
            one.communicate()


def ended(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return which ranks are seen to have ended by rank 0, whose launcher is this process."""
    siblings = Siblings(0, {"RANK": "0", "LOCAL_RANK": "0", **variables})
    if siblings._launcher:
        siblings._launcher = os.getpid()  # the parent of the others
    monkeypatch.setattr("sbp_core.processes.membership._ABSENT_S", 0.0)
    return siblings.ended()


def test_a_rank_that_is_not_there_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(1):
        assert ended(TORCHRUN, monkeypatch) == [2]
    assert ended(TORCHRUN, monkeypatch) == [1, 2]


def test_ranks_of_our_supervisor_are_all_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(2):
        assert ended({"SBP_SUPERVISED_1": "1", "WORLD_SIZE": "3"}, monkeypatch) == [1]


@pytest.mark.parametrize(
    "variables", [BY_HAND, {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, {**TORCHRUN, "RANK": "1"}, {}]
)
def test_what_cannot_be_seen_has_not_ended(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(variables, monkeypatch) == []


def test_a_rank_that_is_not_seen_for_a_moment_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: now)
    siblings = Siblings(0, {"RANK": "0", "LOCAL_RANK": "0", **TORCHRUN})
    siblings._launcher, now = os.getpid(), 10.0

    siblings.check()
    now = 12.0
    with running(1, 2):
        siblings.check()
    now = 14.0
    siblings.check()
    now = 16.0

    with pytest.raises(BoxingError, match="did not open their boxing backend: 1, 2"):
        siblings.check()


def test_before_a_wait_without_looks_who_is_not_there_is_given_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbp_core.processes.membership._LOOK_S", 0.01)
    monkeypatch.setattr("sbp_core.processes.membership._ABSENT_S", 0.05)
    mine = {"RANK": "0", "LOCAL_RANK": "0", **TORCHRUN}
    monkeypatch.setattr(
        "sbp_core.processes.membership.environment_of",
        lambda pid: mine if pid == os.getpid() else {},
    )
    monkeypatch.setattr(Siblings, "_find_launcher", lambda self: os.getpid())
    seen = [{0, 1}, {0}, {0, 1, 2}]
    monkeypatch.setattr(Siblings, "_seen", lambda self: seen.pop(0) if seen else {0, 1})

    Siblings.check_before_waiting()
    assert not seen

    with pytest.raises(BoxingError, match="did not open their boxing backend: 2"):
        Siblings.check_before_waiting()
