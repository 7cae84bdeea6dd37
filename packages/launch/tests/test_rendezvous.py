"""How rank 0 tells the others which run it is."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.processes.launchers import free_port
from sbp_launch.launching.rendezvous import RunOrder, connect
from sbp_launch.world import World


def world(rank: int) -> World:
    return World(rank=rank, size=2, local_rank=rank, local_size=2, launcher="slurm")


def test_rank_0_tells_of_one_run_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    heard: list[RunOrder] = []
    told = [
        RunOrder(folder=Path("/runs/1")),
        RunOrder(folder=Path("/runs/2"), of_sweep=True),
        RunOrder(code=2),
    ]

    def follow() -> None:
        meeting = connect(world(1))
        while not heard or heard[-1].folder is not None:
            heard.append(meeting.receive())

    other = threading.Thread(target=follow)
    other.start()
    meeting = connect(world(0))
    for one in told:
        meeting.broadcast(one)
    other.join(60)

    assert heard == told


def test_rank_0_leaves_last_as_it_may_hold_what_the_others_meet_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    left: list[int] = []

    def follow() -> None:
        meeting = connect(world(1))
        time.sleep(0.3)  # slower than rank 0, which has nothing else to do
        meeting.receive()
        left.append(1)
        meeting.leave(0)

    other = threading.Thread(target=follow)
    other.start()
    meeting = connect(world(0))
    meeting.broadcast(RunOrder())
    meeting.leave(0)
    left.append(0)
    other.join(60)

    assert left == [1, 0]


def test_processes_that_nobody_told_where_to_meet_say_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("MASTER_PORT", raising=False)

    with pytest.raises(ConfigError, match="MASTER_PORT='' does not say where the processes meet"):
        connect(world(0))
