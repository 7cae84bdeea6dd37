"""One call between processes: its time, its errors, and the names that ranks agree on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sbp_core.boxing import BoxingStep, route
from sbp_core.boxing.processes import call as call_module
from sbp_core.boxing.processes.call import CollectiveCall, group_name, tag_number, wait_until
from sbp_core.errors import BoxingError
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


def test_waiting_looks_once_even_without_time_and_ends_when_it_is_done() -> None:
    looks: list[int] = []

    def third_time() -> bool:
        looks.append(len(looks))
        return len(looks) == 3

    assert wait_until(lambda: True, 0.0, first_pause_s=1.0, longest_pause_s=1.0)
    assert wait_until(third_time, 10.0, first_pause_s=1e-4, longest_pause_s=1e-3)
    assert looks == [0, 1, 2]


def test_waiting_in_vain_takes_its_time_and_says_no(clock: list[float]) -> None:
    assert not wait_until(lambda: False, 0.05, first_pause_s=1e-3, longest_pause_s=0.01)

    assert 100.05 <= clock[0] <= 100.06


def test_waiting_passes_on_what_the_look_raises() -> None:
    def look() -> bool:
        raise BoxingError("no hope")

    with pytest.raises(BoxingError, match="no hope"):
        wait_until(look, 10.0, first_pause_s=1e-3, longest_pause_s=1e-3)


def test_groups_of_other_ranks_have_other_names() -> None:
    assert group_name((0, 2)) == "0-2"
    assert len({group_name(ranks) for ranks in ((1, 12), (11, 2), (1, 1, 2), (2, 11))}) == 4


def test_tags_give_equal_numbers_for_equal_texts_only_below_the_bound() -> None:
    tags = [f"actor {actor}, micro-batch {batch}" for actor in range(40) for batch in range(40)]

    assert len({tag_number(tag, 2**31 - 1) for tag in tags}) == len(tags)
    assert all(0 <= tag_number(tag, 32767) < 32767 for tag in tags)
    # The same on every process and machine: nothing of it may depend on a run's hash seed.
    assert tag_number("case 1", 2**31 - 1) == 1627621487
