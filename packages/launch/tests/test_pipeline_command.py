"""`sbp-plan pipeline=NAME`: what it prints, writes and refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sbp_launch.apps.pipeline_command import is_asked, run_pipeline

OF_THE_ISSUE = ["pipeline=1f1b", "stages=4", "micro_batches=8", "times=[1,1.25,0.75]"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_schedule_is_shown_and_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_pipeline(OF_THE_ISSUE)

    told = capsys.readouterr().out
    assert code == 0
    assert told.splitlines()[0] == (
        "makespan 33, period 33, bubble 9 (27.27 % of the makespan), "
        "peak live activations by rank 4 3 2 1"
    )
    assert "rank 3 │" in told
    for written in re.findall(r"wrote (\S+)", told):
        assert Path(written).stat().st_size > 1000
    assert sorted(path.name for path in Path().iterdir()) == [
        "pipeline-1f1b.html",
        "pipeline-1f1b.svg",
    ]


@pytest.mark.parametrize(
    ("more", "figures"),
    [
        (["pipeline=gpipe"], "makespan 33, .* by rank 8 8 8 8"),
        (["pipeline=interleaved", "chunks=4"], "makespan 26.25, .* by rank 4.75 "),
        (["pipeline=zb_h1"], "makespan 28.5, "),
        (["pipeline=1f1b", "times=[[1,1,1],[1,1,1],[2,1,1],[1,1,1]]"], "idle by rank .* "),
        (["pipeline=pipedream"], r"period 3 \(an update every micro-batch"),
        (["pipeline=2bw"], r"period 24 \(an update every 8 micro-batches"),
        (["pipeline=1f1b", "transfer=0.5"], "makespan 41, "),
        (["pipeline=1f1b", "times=[.1,.1,.1]"], "makespan 3.3, "),
    ],
)
def test_the_figures_are_those_of_the_schedule(
    more: list[str], figures: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {one.partition("=")[0]: one for one in [*OF_THE_ISSUE, *more]}

    assert run_pipeline([*given.values(), "out=drawn"]) == 0
    assert re.search(figures, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["pipeline=1f1b", "stages=4"], "micro_batches= is missing"),
        (["pipeline=1f2b", *OF_THE_ISSUE[1:]], "did you mean '1f1b'"),
        ([*OF_THE_ISSUE, "micro_batch=3"], "did you mean micro_batches="),
        ([*OF_THE_ISSUE, "planner=osdp"], "accepted here: pipeline=, stages=, "),
        ([*OF_THE_ISSUE, "stages=3"], "given twice"),
        ([*OF_THE_ISSUE, "--multirun"], "is not a setting"),
        (["pipeline=1f1b", "stages=0", "micro_batches=8"], "stages=0"),
        (["pipeline=1f1b", "stages=x", "micro_batches=8"], "stages=x"),
        ([*OF_THE_ISSUE[:3], "times=1"], "is not a list"),
        ([*OF_THE_ISSUE[:3], "times=[1,2]"], "three times"),
        ([*OF_THE_ISSUE[:3], "times=[1,NaN,1]"], "no time"),
        ([*OF_THE_ISSUE[:3], 'times=[1,"1",1]'], "no time"),
        ([*OF_THE_ISSUE[:3], "times=[[1,1,1]]"], "1 stages"),
        ([*OF_THE_ISSUE, "transfer=-1"], "transfer=-1"),
        ([*OF_THE_ISSUE, "memory=2"], "4 activations"),
        ([*OF_THE_ISSUE, "out=no/such/folder"], "out="),
    ],
)
def test_a_wrong_setting_is_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_pipeline(arguments)

    assert code == 2
    assert told in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_other_command_lines_are_left_to_the_config() -> None:
    assert is_asked(["stages=4", "pipeline=1f1b"])
    assert not is_asked(["planner.pipeline=1f1b", "planner=manual/pipeline"])


def test_help_says_what_there_is_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_pipeline(["pipeline=", "--help"]) == 0

    assert "micro_batches=" in capsys.readouterr().out
