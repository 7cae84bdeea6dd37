"""`sbp-plan timeline=NAME`: lanes and bars of a plan's simulated step, and the drawings."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from trainable import plan_step, registry, run_config, run_of

from sbp_core.errors import ConfigError
from sbp_core.timeline import Bar, Lane, Timeline
from sbp_launch.apps import plan
from sbp_launch.apps.plan import PlanConfig, PlanRun
from sbp_launch.explaining.plan_timeline import coarse, plan_timeline, timeline_facts
from sbp_launch.planning.flow import Planned
from sbp_launch.trainer.run_program import make_program


@cache
def planned_over(axis: str) -> Planned:
    run = run_of(run_config(axes=(axis,), micro_batches=2))
    return plan_step(run, make_program(run))


def timeline_of(axis: str) -> Timeline:
    made = planned_over(axis)
    return plan_timeline(made.plan, made.simulation, "a step")


def bars(*lengths_s: float, kind: str = "F") -> tuple[Bar, ...]:
    """Return bars one behind the other, with their numbers as labels."""
    made, now_s = [], 0.0
    for number, length_s in enumerate(lengths_s):
        made.append(
            Bar(label=str(number), kind=kind, start_s=now_s, end_s=now_s + length_s, detail="one")
        )
        now_s += length_s
    return tuple(made)


def test_ranks_that_do_the_same_share_a_lane() -> None:
    timeline = timeline_of("data")

    assert [lane.name for lane in timeline.lanes] == ["ranks 0-1"]
    assert timeline.end_s == planned_over("data").simulation.step_s


def test_stages_have_lanes_and_micro_batches_are_numbered_in_every_phase() -> None:
    timeline = timeline_of("pipe")

    assert [lane.name for lane in timeline.lanes] == ["rank 0", "rank 1"]
    last = {(bar.kind, bar.label) for bar in timeline.lanes[1].bars}
    assert {(kind, str(number)) for kind in "FIW" for number in range(2)} <= last
    assert ("update", "") in last
    # The first stage sends no input gradients, so its backward is in one.
    assert {bar.kind for bar in timeline.lanes[0].bars} >= {"F", "B"}


@pytest.mark.parametrize("axis", ["data", "pipe"])
def test_bars_of_a_lane_follow_each_other_and_take_the_time_of_the_firings(axis: str) -> None:
    made = planned_over(axis)

    timeline = timeline_of(axis)

    for lane in timeline.lanes:
        rank = int(lane.name.split()[1].split("-")[0])
        ends_s = 0.0
        for bar in lane.bars:
            assert bar.start_s >= ends_s - 1e-12
            ends_s = bar.end_s
        length_s = sum(bar.end_s - bar.start_s for bar in lane.bars)
        assert length_s == pytest.approx(made.simulation.busy_s[rank, "compute"])


def test_facts_say_shares_that_make_up_the_step_and_the_critical_cycle() -> None:
    made = planned_over("pipe")

    facts = timeline_facts(made)

    shares = [facts[name] for name in ("computing", "boxing", "bubble (idle)")]
    assert sum(float(share.partition(" ")[0]) for share in shares) == pytest.approx(100, abs=0.2)
    assert "waits for" in facts["critical cycle"]


def test_a_timeline_with_few_bars_is_left_as_it_is() -> None:
    timeline = Timeline(title="", lanes=(Lane(name="rank 0", bars=bars(1, 2, 3)),))

    assert coarse(timeline) == (timeline, [])


def test_too_many_bars_are_joined_to_no_more_than_allowed_and_it_is_said() -> None:
    timeline = Timeline(title="", lanes=(Lane(name="rank 0", bars=bars(*[0.001] * 5000, 5.0)),))

    drawn, said = coarse(timeline, num_bars=100)

    (lane,) = drawn.lanes
    assert len(lane.bars) <= 100
    assert lane.bars[0].start_s == 0.0 and drawn.end_s == timeline.end_s
    assert (lane.bars[-1].label, lane.bars[-1].start_s) == ("5000", pytest.approx(5.0))
    assert said[0].startswith("bars and gaps below")


def test_what_is_too_short_is_drawn_as_the_longest_beside_it() -> None:
    short = [*bars(0.001, 0.003, 0.001), *bars(*[1.0] * 3)[1:]]
    timeline = Timeline(title="", lanes=(Lane(name="rank 0", bars=tuple(short)),))

    drawn, _ = coarse(timeline, num_bars=3)

    assert [bar.label for bar in drawn.lanes[0].bars] == ["1", "1", "2"]


def test_lanes_beyond_the_most_are_left_out_and_it_is_said() -> None:
    lanes = tuple(Lane(name=f"rank {n}", bars=bars(1 + n)) for n in range(5))

    drawn, said = coarse(Timeline(title="", lanes=lanes), num_lanes=2)

    assert drawn.lanes == lanes[:2]
    assert said == ["the first 2 lanes are drawn, and 3 are not"]


@pytest.mark.slow
def test_drawings_are_written_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "step")
    asked = PlanRun(run=run_config(micro_batches=2), settings=PlanConfig(timeline=out))

    plan._plan(asked, registry(), tmp_path)

    told = capsys.readouterr().out
    assert "ranks 0-1 │F" in told
    assert f"wrote {out}.svg" in told and f"wrote {out}.html" in told
    assert "critical cycle" in (tmp_path / "step.html").read_text("utf-8")
    assert (tmp_path / "step.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.parametrize("name", ["missing/step", "file.txt/step", "taken"])
def test_a_place_where_no_drawing_can_be_is_refused_before_anything_is_planned(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file.txt").write_text("", encoding="utf-8")
    (tmp_path / "taken.svg").mkdir()

    with pytest.raises(ConfigError, match="timeline=") as caught:
        PlanConfig(timeline=str(tmp_path / name))

    assert caught.value.accepted
