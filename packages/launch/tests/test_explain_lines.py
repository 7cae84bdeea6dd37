"""The answers of `explain=`, as they are printed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from test_alternatives import replan
from test_rows import found_plan

from sbp_core.errors import ConfigError
from sbp_launch.explaining.alternatives import MOST_PLANNING_S, ExplainRequest, explain_lines
from sbp_launch.explaining.plan_figures import figures_of
from sbp_launch.explaining.question import Question
from sbp_launch.explaining.reasons import percent, reason


def answer(question: str, planning_s: float = 0.1) -> list[str]:
    asked = ExplainRequest(planned=found_plan("replicated"), replan=replan, planning_s=planning_s)
    return list(explain_lines(Question.parse(question), asked))


def test_a_pin_stands_beside_the_plan_with_a_reason_and_what_travels() -> None:
    lines = answer("head.weight: S(0)")

    text = "\n".join(lines)
    assert lines[0] == "explain head.weight: S(0): how head.weight is stored"
    assert lines[1] == "  in this plan (data): (B)"
    assert re.match(r"  (slower|faster) by \S+%: |  as fast", lines[2])
    assert re.search(r"predicted step +\S+ \S+ +\S+ \S+ +[-+=]", text)
    assert "additional or different communication:" in text and "planned again: " in text


def test_what_is_not_legal_is_said_with_what_is() -> None:
    text = "\n".join(answer("embed: S(9)"))

    assert "not legal: " in text and "accepted here: " in text
    assert "predicted step" not in text


@pytest.mark.slow
def test_all_ways_are_a_table_with_the_fastest_first_and_say_what_is_not_legal() -> None:
    lines = answer("embed")

    rows = [line.strip() for line in lines if re.match(r"[* ]  \([A-Z]", line)]
    assert rows[0].startswith("*")
    times = [re.search(r"\)\s+(\S+) (ms|µs|s)", line) for line in rows[1:]]
    factors = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    seconds = [float(found[1]) * factors[found[2]] for found in times if found]
    assert len(seconds) == len(rows) - 1 > 0
    assert seconds == sorted(seconds)
    assert any(line.startswith("not legal: (P)") for line in lines)
    assert f"planner {found_plan('replicated').strategy.planner} plans" in lines[-1]


def test_of_a_planner_that_takes_long_only_what_is_nearby_is_planned_anew() -> None:
    (*_, last) = answer("head.weight", planning_s=MOST_PLANNING_S)

    assert "each changes only the pinned part" in last


def test_ways_that_there_was_no_time_for_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbp_launch.explaining.alternatives.MOST_S", -1.0)

    text = "\n".join(answer("head.weight"))

    assert "not tried within -1 s: (S(0)), (S(1))" in text


def test_what_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="matches no tensor"):
        answer("heda")


def test_a_plan_beside_itself_is_as_fast() -> None:
    planned = found_plan("replicated")
    figures = figures_of(planned)

    assert reason(planned, planned, figures, figures) == "as fast, with the same memory"


def test_a_plan_that_does_not_fit_says_where_it_is_fullest() -> None:
    planned = found_plan("replicated")
    before = figures_of(planned)
    after = replace(before, limit_bytes=1)

    text = reason(planned, planned, before, after)

    assert text.startswith("does not fit 1 B: rank 0 at its peak, in firing ")


def test_a_slower_plan_is_told_by_what_takes_the_time() -> None:
    now, then = found_plan("replicated"), replan({"head.weight": "S(0)"})
    before, after = figures_of(now), figures_of(then)

    slower, faster = reason(now, then, before, after), reason(then, now, after, before)

    assert slower.startswith("slower by ") and faster.startswith("faster by ")
    assert ": needs in " in slower and ": saves in " in faster


def test_shares_are_written_with_two_digits() -> None:
    assert [percent(share) for share in (0.004, 0.0312, 0.12, 2.3)] == [
        "0.4%", "3.1%", "12%", "230%",
    ]  # fmt: skip
