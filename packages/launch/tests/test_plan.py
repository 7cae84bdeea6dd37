"""`sbp-plan out=FILE`: what it refuses before it plans, and what it writes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_rows import found_plan
from trainable import registry, run_config

from sbp_core import strategy_yaml
from sbp_core.compile.rank_calls import RANK_CALLS
from sbp_core.errors import ConfigError
from sbp_core.strategy import Strategy
from sbp_launch.apps import plan
from sbp_launch.apps.plan import PlanConfig, PlanRun, next_command, save_strategy


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("strategy.txt", "ends in none of .yaml, .yml, .json"),
        ("strategy", "ends in none of"),
        ("missing/strategy.yaml", "is no folder"),
        ("folder.yaml", "is no file"),
        ("there.yaml", "exists"),
        ("file.txt/strategy.yaml", "is no folder"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "there.yaml").write_text("mine", encoding="utf-8")
    (tmp_path / "file.txt").write_text("", encoding="utf-8")

    with pytest.raises(ConfigError, match=what) as caught:
        PlanConfig(out=str(tmp_path / name))

    assert caught.value.accepted
    assert (tmp_path / "there.yaml").read_text(encoding="utf-8") == "mine"


def test_a_file_that_exists_is_overwritten_if_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "there.yaml"
    file.write_text("mine", encoding="utf-8")

    PlanConfig(out=str(file), overwrite=True)

    assert file.read_text(encoding="utf-8") == "mine"  # until there is a plan


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"page": "x.html"}, {"timeline": "x"}, id="the ending of a drawing"),
        pytest.param({"trace": "x.json"}, {"calls": "./x.json"}, id="a dot"),
        pytest.param({"trace": "x.json"}, {"figures": "sub/../x.json"}, id="dots"),
        pytest.param({"calls": "x.json"}, {"figures": "link/x.json"}, id="a link of a folder"),
        pytest.param({"figures": "x.json"}, {"out": "hard.json"}, id="one file with two names"),
        pytest.param({"calls": "x.json"}, {"out": "{here}/x.json"}, id="a whole path"),
        pytest.param({"out": "soft.json"}, {"trace": "new.json"}, id="a link to no file"),
    ],
)
def test_two_outputs_are_not_written_to_one_file(
    first: dict[str, str],
    second: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sub").mkdir()
    Path("link").symlink_to(".")
    Path("soft.json").symlink_to("new.json")
    if "hard.json" in second.values():
        Path("x.json").touch()
        Path("hard.json").hardlink_to("x.json")
    paths = {key: path.format(here=tmp_path) for key, path in {**first, **second}.items()}

    with pytest.raises(ConfigError, match="are written to one file") as caught:
        PlanConfig(**paths, overwrite=True)

    for key, path in paths.items():
        assert f"{key}={path}" in caught.value.what


def test_outputs_with_names_of_their_own_are_accepted(tmp_path: Path) -> None:
    base = str(tmp_path / "x")

    PlanConfig(
        timeline=base,
        page=f"{base}.page.html",
        trace=f"{base}.json",
        calls=f"{base}.calls.json",
        figures=f"{base}.figures.json",
        out=f"{base}.yaml",
    )


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    PlanConfig(out=str(tmp_path / "new.json"))

    assert list(tmp_path.iterdir()) == []


def test_the_calls_of_a_step_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "calls.json")
    asked = PlanRun(run=run_config(), settings=PlanConfig(calls=path))

    plan._plan(asked, registry(), tmp_path)

    calls = RANK_CALLS.read(Path(path))
    assert calls.num_ranks == 2
    assert any(one.call.startswith("aten.mm.default(float32") for one in calls.calls)
    out = capsys.readouterr().out
    assert f"wrote {path}: {len(calls.calls)} calls of operators on a rank" in out
    assert f"sbp-calibrate ops={path} out=CLUSTER_FILE" in out


@pytest.mark.parametrize("name", ["calls.txt", "missing/calls.json"])
def test_a_place_where_no_list_can_be_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="calls="):
        PlanConfig(calls=str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "a.json"])
def test_the_file_is_the_strategy(tmp_path: Path, name: str) -> None:
    strategy, path = found_plan("replicated").strategy, tmp_path / name

    save_strategy(strategy, str(path))

    load = Strategy.load if name.endswith("json") else strategy_yaml.load
    assert load(path) == strategy


@pytest.mark.slow
def test_a_plan_is_written_and_the_next_command_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "a.yaml")
    overrides = ("planner=even", f"out={out}", "cluster.mesh=[2]", "trainer.micro_batches=2")
    asked = PlanRun(
        run=run_config(micro_batches=2), settings=PlanConfig(out=out), overrides=overrides
    )

    plan._plan(asked, registry(), tmp_path)

    *_, wrote, command = capsys.readouterr().out.splitlines()
    assert wrote.startswith(f"wrote {out}")
    assert shlex.split(command) == [
        "sbp-train",
        "planner=file",
        f"planner.path={out}",
        "cluster.mesh=[2]",
        "trainer.micro_batches=2",
    ]
    assert strategy_yaml.load(Path(out)).num_micro_batches == 2


@given(
    st.lists(
        st.sampled_from(
            ["model=llama", "planner.pins={}", "+planner.x=1", "out=a", "overwrite=true", "~logger"]
        )
    ),
    st.text(min_size=1),
)
def test_the_next_command_keeps_what_was_said_of_all_else(said: list[str], path: str) -> None:
    words = shlex.split(next_command(path, said))

    assert words[:3] == ["sbp-train", "planner=file", f"planner.path={path}"]
    assert words[3:] == [text for text in said if text in ("model=llama", "~logger")]


@pytest.mark.slow
def test_the_command_line_refuses_before_anything_is_planned(app, tmp_path: Path) -> None:
    done = app("out=strategy.txt", config="plan")

    assert done.code == 2
    assert "out='strategy.txt' ends in none of" in done.err
    assert "the command line: out=strategy.txt" in done.err
    assert not done.torch
    assert done.made == []


def test_other_plans_of_a_sweep_are_made_when_one_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applications = []
    monkeypatch.setattr(plan, "run", applications.append)

    with pytest.raises(SystemExit):
        plan.main()

    assert applications[0].sweep_goes_on


@pytest.mark.slow
def test_the_exact_memory_is_a_stage_of_its_own_unless_the_check_has_predicted_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan._plan(PlanRun(run=run_config(), settings=PlanConfig()), registry(), tmp_path)

    told = capsys.readouterr().out
    assert "predicting the memory of each rank ..." in told
    assert told.index("checking its memory") < told.index("predicting the memory")
    assert told.index("predicting the memory") < told.index("memory of a rank at its peak")
