"""What processes say to each other between steps; here they are threads, each with its backend."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sbp_core.errors import BoxingError, ConfigError, RunError
from sbp_launch.run.stopping import StopSignals, Terminated
from sbp_launch.team import Team, fail_together, stop_together
from sbp_launch.trainer.figures import MeasuredUsage
from sbp_torch.boxing import LocalBackend


def among(num_ranks: int, call: Callable[[int, Team], Any]) -> list[Any]:
    """Return what a function returns, or raises, on each rank of a team."""
    backend, found = LocalBackend(), [None] * num_ranks
    backend.open(range(num_ranks))

    def run(rank: int) -> None:
        team = Team(backend.communicator(rank), range(num_ranks))
        try:
            found[rank] = call(rank, team)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    backend.close()
    return found


def test_the_highest_vote_is_heard_by_all() -> None:
    votes = [[0, 0, 0], [0, 15, 2], [7, 0, 0]]
    found = among(3, lambda rank, team: [team.highest(vote[rank]) for vote in votes])
    assert found == [[0, 15, 7]] * 3


def test_of_several_numbers_the_highest_in_each_place_is_heard_by_all() -> None:
    values = [[0, 10**15, 3], [1, 7, 3], [0, 0, 9]]

    found = among(3, lambda rank, team: team.highest_of(values[rank]))

    assert found == [[1, 10**15, 9]] * 3


def test_what_one_process_asks_for_is_heard_by_all_where_nobody_stops() -> None:
    found = among(
        2, lambda rank, team: stop_together(team, StopSignals(), asked=[rank, 5 - rank, 0])
    )

    assert found == [[1, 5, 0]] * 2


def test_votes_go_where_the_transport_takes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, given = LocalBackend(), []
    backend.open(range(2))
    communicator = backend.communicator(0)
    communicator.device = "meta"

    def collective(step: Any, shard: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        given.append(shard.device.type)
        return torch.tensor([15])

    monkeypatch.setattr(communicator, "collective", collective)

    assert Team(communicator, range(2)).highest(0) == 15
    assert given == ["meta"]
    backend.close()


def test_a_sample_that_one_process_cannot_read_stops_all_and_is_named() -> None:
    broken = ConfigError("cut off", where=("a.txt, byte 12", "sample 7 of split 'train'"))

    def load(rank: int, team: Team) -> bool:
        fail_together(team)
        fail_together(team, broken if rank == 2 else None)
        raise AssertionError("nobody gets here")

    found = among(3, load)

    assert found[2] is broken
    for other in found[:2]:
        assert isinstance(other, RunError)
        assert other.what.splitlines() == [
            "rank 2 cannot continue: cut off",
            "  in a.txt, byte 12",
            "  in sample 7 of split 'train'",
        ]


def test_a_long_text_of_a_process_that_cannot_go_on_is_cut() -> None:
    found = among(2, lambda rank, team: fail_together(team, RunError("ü" * 9000) if rank else None))

    assert found[0].what == "rank 1 cannot continue: " + "ü" * 1000


def test_texts_are_gathered_in_order() -> None:
    found = among(3, lambda rank, team: team.gather(f"rank {rank}"))
    assert found == [["rank 0", "rank 1", "rank 2"]] * 3


def test_what_all_processes_measured_is_put_together() -> None:
    def measured(rank: int, team: Team) -> MeasuredUsage:
        own = MeasuredUsage(peak_bytes=10 + rank, sent_bytes=0.5 + rank)
        return MeasuredUsage.of_all(team.gather(own.to_text()))

    assert among(2, measured) == [MeasuredUsage(peak_bytes=11, sent_bytes=2.0)] * 2


def stopping(rank: int, team: Team, number: int = 0, problem: Exception | None = None) -> None:
    """Take part in the vote behind a step: rank 1 has a signal, or a problem."""
    signals = StopSignals()
    if rank == 1 and number:
        signals.pending = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
    try:
        stop_together(team, signals, problem if rank == 1 else None)
    finally:
        assert team.stops_together is (number > 0 or problem is not None)


def test_nobody_stops_for_nothing() -> None:
    assert among(2, stopping) == [None, None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_one_process_stops_all_with_its_exit_code(number: int) -> None:
    found = among(2, lambda rank, team: stopping(rank, team, number))
    assert [type(error) for error in found] == [Terminated, Terminated]
    assert [error.code for error in found] == [128 + number] * 2


def test_an_interrupt_of_one_process_interrupts_all() -> None:
    found = among(2, lambda rank, team: stopping(rank, team, signal.SIGINT))
    assert [type(error) for error in found] == [KeyboardInterrupt] * 2


def test_a_problem_of_one_process_goes_before_signals_and_stops_all() -> None:
    full = RunError("no space is left")
    found = among(2, lambda rank, team: stopping(rank, team, signal.SIGTERM, full))
    assert found[1] is full
    assert (
        isinstance(found[0], RunError)
        and found[0].what == "rank 1 cannot continue: no space is left"
    )


def test_a_process_tells_its_own_problem_where_another_does_not_come() -> None:
    full = RunError("no space is left")

    def stop(rank: int, team: Team) -> None:
        if rank == 1:
            stop_together(team, StopSignals(), full, deadline_s=0.1)

    found = among(2, stop)

    assert found[1] is full
    assert isinstance(full.__context__, BoxingError)


def test_a_process_that_is_alone_agrees_with_itself() -> None:
    team = Team.of(LocalBackend(), range(4))
    assert team.stops_together and team.highest(3) == 3 and team.gather("x") == ["x"]
