"""The command among processes that a launcher started: rank 0 leads, and the others follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError, RunError
from sbp_launch.apps import train
from sbp_launch.launching import launching
from sbp_launch.launching.rendezvous import Rendezvous, RunOrder
from sbp_launch.world import World


class MadeUpMeeting(Rendezvous):
    """Keeps what it is told; the others receive what is given."""

    def __init__(self, given: Sequence[RunOrder] = ()) -> None:
        self.given, self.told, self.left = list(given), list[RunOrder](), list[int]()

    def broadcast(self, told: RunOrder) -> None:
        self.told.append(told)

    def receive(self) -> RunOrder:
        return self.given.pop(0)

    def leave(self, code: int) -> None:
        self.left.append(code)

    def _send(self, text: str) -> None: ...

    def _receive(self) -> str: ...


def exit_code(
    monkeypatch: pytest.MonkeyPatch, rank: int, meeting: MadeUpMeeting | Exception
) -> object:
    """Run the command as one of two processes; return its exit code."""
    world = World(rank=rank, size=2, local_rank=rank, local_size=2, launcher="torchrun")
    monkeypatch.setattr(train.World, "of_environment", lambda: world)

    def connect(world: World) -> Rendezvous:
        if isinstance(meeting, Exception):
            raise meeting
        return meeting

    monkeypatch.setattr(train, "connect", connect)
    with pytest.raises(SystemExit) as caught:
        train.main()
    return caught.value.code


@pytest.mark.parametrize("code", [0, 2, 143])
@pytest.mark.parametrize("by_exit", [False, True])
def test_rank_0_tells_the_others_how_it_ended(
    code: int, by_exit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(app: object) -> int:
        if by_exit:
            raise SystemExit(code)
        return code

    monkeypatch.setattr(train, "run", run)
    meeting = MadeUpMeeting()

    assert exit_code(monkeypatch, 0, meeting) == code
    assert (meeting.told, meeting.left) == ([RunOrder(code=code)], [code])


def test_the_others_are_told_of_a_mistake_of_ours_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(app: object) -> int:
        raise KeyError("ours")

    monkeypatch.setattr(train, "run", run)
    meeting = MadeUpMeeting()

    with pytest.raises(KeyError):
        exit_code(monkeypatch, 0, meeting)
    assert meeting.told == [RunOrder(code=1)]


@pytest.mark.parametrize(
    ("codes", "of_sweep", "last", "runs", "code"),
    [
        ([0, 0], True, 0, 2, 0),
        ([0, 0], True, 130, 2, 130),
        ([1, 0], False, 1, 1, 1),
        ([1, 0], True, 1, 2, 1),
        ([2, 0], True, 0, 2, 2),
        ([130, 0], True, 130, 1, 130),
    ],
)
def test_another_rank_follows_from_run_to_run_of_a_sweep_and_until_one_fails_or_is_stopped(
    codes: list[int],
    of_sweep: bool,
    last: int,
    runs: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Path] = []

    def run_rank(folder: Path, world: World) -> int:
        ran.append(folder)
        return codes[len(ran) - 1]

    monkeypatch.setattr(launching, "run_rank", run_rank)
    folders = [Path("0"), Path("1")]
    told = [RunOrder(folder=folder, of_sweep=of_sweep) for folder in folders]
    meeting = MadeUpMeeting([*told, RunOrder(code=last)])

    assert exit_code(monkeypatch, 1, meeting) == code
    assert ran == folders[:runs]
    assert meeting.left == [code]


@pytest.mark.parametrize(
    ("error", "code", "speakers"),
    [(ConfigError("no MPI"), 2, [0]), (RunError("rank 1 does not reach it"), 1, [0, 1])],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_setting_that_keeps_ranks_from_meeting_is_said_once_and_a_failure_by_each(
    error: Exception,
    code: int,
    speakers: list[int],
    rank: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(monkeypatch, rank, error) == code
    assert capsys.readouterr().err == (f"sbp-train: {error}\n" if rank in speakers else "")


def test_ctrl_c_ends_a_rank_that_waits_for_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(MadeUpMeeting):
        def receive(self) -> RunOrder:
            raise KeyboardInterrupt

    assert exit_code(monkeypatch, 1, Waiting()) == 130
