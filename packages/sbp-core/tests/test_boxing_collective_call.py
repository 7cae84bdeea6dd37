"""One call of a communicator: its time and its errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sbp_core.boxing import BoxingStep, route
from sbp_core.boxing import collective_call as call_module
from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P


def reduce_step() -> BoxingStep:
    mesh = Placement([0, 1], ("x",))
    (step,) = route((4, 2), "float32", (mesh, NdSbp(P)), (mesh, NdSbp(B))).steps
    return step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, alone: it goes on while somebody sleeps."""
    now = [100.0]

    def sleep(pause_s: float) -> None:
        now[0] += pause_s

    monkeypatch.setattr(call_module, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.mark.usefixtures("clock")
def test_a_call_has_time_left_until_its_deadline_is_over() -> None:
    long = CollectiveCall.begin(reduce_step(), "sum", 0, 60.0)
    over = CollectiveCall.begin(reduce_step(), "sum", 0, 0.0)

    assert long.left_s == 60.0 and not long.is_over
    assert 0.0 < over.left_s < 0.01 and over.is_over


def test_a_call_that_is_restarted_has_all_its_time_again(clock: list[float]) -> None:
    call = CollectiveCall.begin(reduce_step(), "sum", 0, 60.0)
    clock[0] += 50.0

    call.restart()

    assert call.left_s == 60.0


def test_the_errors_of_a_call_name_its_tag_step_and_rank() -> None:
    call = CollectiveCall.begin(reduce_step(), "sum 3", 1, 2.5)

    missing, failed = str(call.missing([0])), str(call.failed("the cable is cut"))

    assert "'sum 3' waited 2.5 s" in missing and "did not arrive: 0" in missing
    assert "'sum 3' could not complete: the cable is cut" in failed
    for message in (missing, failed):
        assert "rank 1" in message and "all-reduce" in message
