"""From a command line to plain values, in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from omegaconf import DictConfig

import sbp_launch
from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginSource, discover
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.check import check, choose
from sbp_launch.settings.compose import (
    MOST_JOBS_CHECKED,
    compose,
    expand_globs,
    read,
    refuse_conflicts,
    sweep_jobs,
)
from sbp_launch.settings.config import Application

LAUNCH_ONLY = discover(
    [PluginSource(name="launch", value="sbp_launch.plugin", distribution="sbp-launch")]
)


def test_a_sweep_is_the_product_of_its_choices() -> None:
    jobs = sweep_jobs(["trainer.steps=1,2", "model=gpt", "cluster.mesh=[1,2]", "x=choice(a,b)"])

    assert jobs == (
        ("trainer.steps=1", "model=gpt", "cluster.mesh=[1,2]", "x=a"),
        ("trainer.steps=1", "model=gpt", "cluster.mesh=[1,2]", "x=b"),
        ("trainer.steps=2", "model=gpt", "cluster.mesh=[1,2]", "x=a"),
        ("trainer.steps=2", "model=gpt", "cluster.mesh=[1,2]", "x=b"),
    )


def test_what_only_another_sweeper_understands_is_left_out() -> None:
    assert sweep_jobs(["x=interval(0,1)", "y=1"]) == (("y=1",),)


@pytest.mark.parametrize("text", ["trainer.steps=range(5,5)", "x=range(1,0)"])
def test_a_sweep_over_no_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="has no values"):
        sweep_jobs(["y=1,2", text])


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("optimizer=glob(ad*)", "optimizer=adafactor,adagrad,adam,adamw"),
        ("optimizer=glob(*,exclude=[a*,l*])", "optimizer=muon,rmsprop,row_wise_adagrad,sgd"),
        ("+model=glob(*)", "+model=mine"),
        ("model=glob(*/*)", "model=deep/one,deep/two"),
        ("optimizer=sgd", "optimizer=sgd"),
        ("x.y='=glob(*)'", "x.y='=glob(*)'"),
    ],
)
def test_a_glob_names_the_options_that_it_stands_for(
    tmp_path: Path, text: str, expanded: str
) -> None:
    (tmp_path / "model" / "deep").mkdir(parents=True)
    for name in ("mine", "deep/one", "deep/two"):
        (tmp_path / "model" / f"{name}.yaml").write_text("name: x\n", "utf-8")

    assert expand_globs([text], make_catalog(LAUNCH_ONLY, str(tmp_path))) == [expanded]


@pytest.mark.parametrize("text", ["optimizer=glob(x*)", "optimizer=glob(*/*)", "nothing=glob(*)"])
def test_a_glob_that_stands_for_no_option_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="matches no option of the group") as caught:
        expand_globs([text], make_catalog(LAUNCH_ONLY))

    assert "optimizer" in caught.value.accepted or "adamw" in caught.value.accepted


def test_a_config_is_composed_and_checked_as_on_the_command_line(tmp_path: Path) -> None:
    # The model, the data, the planner and the runtime are brought by other packages.
    own = "defaults: [optimizer: sgd]\n"
    (tmp_path / "own.yaml").write_text(own, "utf-8")

    with pytest.raises(ConfigError, match="no such option of the group 'optimizer'"):
        sbp_launch.compose(["optimizer=sdg"], config_name="own", config_dir=tmp_path)
    with pytest.raises(ConfigError, match="optimizer is set twice"):
        sbp_launch.compose(["optimizer=lion", "optimizer=adam"], config_dir=tmp_path)


OWN = "defaults: [cluster: local, optimizer: mine]\n"


@pytest.mark.parametrize(
    ("mine", "overrides", "variable"),
    [
        ("defaults: [sgd]\n", ["optimizer.lr=${oc.env:LR}"], "${oc.env:LR}"),
        ("defaults: [sgd]\nlr: ${oc.env:LR}\n", [], "${oc.env:LR}"),
        ("defaults: [sgd]\nlr: ${oc.env:OTHER,0.25}\n", [], "${oc.env:OTHER,0.25}"),
    ],
)
def test_a_variable_that_is_no_number_says_how_it_becomes_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mine: str,
    overrides: list[str],
    variable: str,
) -> None:
    monkeypatch.setenv("LR", "0.25")
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "own.yaml").write_text(OWN, "utf-8")
    (tmp_path / "optimizer" / "mine.yaml").write_text(mine, "utf-8")
    catalog = make_catalog(LAUNCH_ONLY, str(tmp_path))

    with pytest.raises(ConfigError, match=r"optimizer\.lr is '0.25'") as caught:
        config = composed(*overrides, config_name="own", config_dir=tmp_path)
        choose(read(config, catalog), LAUNCH_ONLY, "optimizer")

    decoded = f'"${{oc.decode:{variable}}}"'
    assert decoded in caught.value.todo
    override = f"optimizer.lr={decoded}"  # what the error tells to write
    config = composed(override, config_name="own", config_dir=tmp_path)
    assert read(config, catalog).values["optimizer"]["lr"] == 0.25  # type: ignore[index]


@pytest.mark.parametrize("name", ["", "name: sgd\n"])
def test_an_option_that_begins_with_one_in_a_folder_says_how_it_takes_its_settings(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "optimizer" / "slow").mkdir(parents=True)
    (tmp_path / "own.yaml").write_text(OWN, "utf-8")
    (tmp_path / "optimizer" / "slow" / "one.yaml").write_text("name: sgd\nlr: 0.5\n", "utf-8")
    mine = tmp_path / "optimizer" / "mine.yaml"
    catalog = make_catalog(LAUNCH_ONLY, str(tmp_path))

    def chosen(default: str) -> object:
        mine.write_text(f"defaults: [{default}]\n{name}", "utf-8")
        config = composed(config_name="own", config_dir=tmp_path)
        return choose(read(config, catalog), LAUNCH_ONLY, "optimizer")[0].settings["lr"]

    with pytest.raises(ConfigError) as caught:
        chosen("slow/one")

    assert "write slow/OPTION@_here_ there" in caught.value.todo
    assert chosen("slow/one@_here_") == 0.5


def test_a_huge_sweep_is_checked_in_part() -> None:
    jobs = sweep_jobs(["x=range(0,1000)", "y=range(0,1000)"])

    assert len(jobs) == MOST_JOBS_CHECKED


def test_an_override_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError):
        sweep_jobs(["x=[1,"])


def test_a_catalog_knows_groups_options_and_files() -> None:
    catalog = make_catalog(LAUNCH_ONLY)

    options = catalog.options("optimizer")
    file = catalog.file("optimizer/adamw")
    nowhere = catalog.file("optimizer/nothing")
    owners = catalog.owners("optimizer/adamw")

    assert catalog.groups() == (
        "cluster",
        "compile",
        "launcher",
        "logger",
        "optimizer",
        "storage",
        "trainer",
    )
    assert options == (
        "adafactor",
        "adagrad",
        "adam",
        "adamw",
        "lamb",
        "lars",
        "lion",
        "muon",
        "rmsprop",
        "row_wise_adagrad",
        "sgd",
    )
    assert file == "sbp_launch/conf/optimizer/adamw.yaml"
    assert nowhere == ""
    assert owners == ("sbp-launch",)


def composed(
    *overrides: str, config_name: str = "config", config_dir: Path | None = None
) -> DictConfig:
    catalog = make_catalog(LAUNCH_ONLY, str(config_dir) if config_dir else None)
    app = Application(name="x", about="", config_name=config_name, check=check, task=print)
    return compose(catalog, app, overrides)


def test_a_folder_is_searched_for_one_config_and_not_for_the_next(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("x: 1\n", encoding="utf-8")

    found = composed(config_name="own", config_dir=tmp_path)

    assert found.x == 1
    with pytest.raises(ConfigError, match="own"):
        composed(config_name="own")


def test_an_option_of_a_group_that_nobody_else_knows_sets_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrainer: {steps: 7}\n"
    (tmp_path / "experiment" / "short.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "own.yaml").write_text("defaults: [trainer: default]\n", encoding="utf-8")

    found = composed("+experiment=short", config_name="own", config_dir=tmp_path)

    assert found.trainer.steps == 7
    with pytest.raises(ConfigError, match="experiment=shrt") as caught:
        composed("+experiment=shrt", config_name="own", config_dir=tmp_path)
    assert caught.value.todo == "did you mean experiment=short?"


def test_the_name_of_a_folder_of_options_is_answered_with_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "experiment" / "gpt").mkdir(parents=True)
    for name in ("long", "short"):
        text = "# @package _global_\ntrainer: {steps: 7}\n"
        (tmp_path / "experiment" / "gpt" / f"{name}.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "own.yaml").write_text("defaults: [trainer: default]\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="experiment=gpt") as caught:
        composed("+experiment=gpt", config_name="own", config_dir=tmp_path)

    assert caught.value.todo == "choose one of them: experiment=gpt/long, or another of gpt/..."


@pytest.mark.parametrize("override", ["trainer=5", "trainer=null", "trainer=[1]", "=5"])
def test_what_is_no_name_of_an_option_is_refused_without_a_traceback(override: str) -> None:
    with pytest.raises(ConfigError, match="the config cannot be composed"):
        composed(override)


def test_deleting_what_is_not_there_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [trainer: default]\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="'loggr'") as caught:
        composed("~loggr", config_name="own", config_dir=tmp_path)

    assert caught.value.todo == "did you mean 'logger'?"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("trainer.steps=5", "trainer.steps=7"),
        ("planner=osdp", "planner=propagate"),
        ("+planner.pins={}", "planner.pins={a: B}"),
        ("hydra.run.dir=a", "hydra.run.dir=b"),
        ("trainer.steps=1,2", "trainer.steps=3"),
    ],
)
def test_a_key_that_is_set_twice_is_refused_with_both(first: str, second: str) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_conflicts([first, "model=gpt", second])

    assert first in caught.value.what
    assert second in caught.value.what


def test_the_same_twice_is_no_conflict_and_neither_is_a_part_of_a_mapping() -> None:
    refuse_conflicts(["steps=5", "steps=5", "~logger", "logger=csv", "a={b: 1}", "a.b=2"])


@pytest.mark.parametrize(
    ("data", "what", "line"),
    [
        (b"steps: [2\nseed: 1\n", "expected ',' or ']', but got ':'", ", line 2: seed: 1"),
        (b"steps: 2\nschedule:\n\tdecay: linear\n", "a tab", ", line 3: decay: linear"),
        (b"steps: 2\nsteps: 3\n", "'steps' occurs twice, the first time in line 1", ", line 2"),
        (b"- steps\n", "is a list, not a mapping", ", line 1"),
        (b"\xff\xfe", "is no UTF-8", ""),
        (b"steps: !!python/object:os.system {}\n", "python/object:os.system", ", line 1"),
    ],
)
def test_an_option_file_that_is_none_is_refused_with_its_name_and_line(
    tmp_path: Path, data: bytes, what: str, line: str
) -> None:
    (tmp_path / "own.yaml").write_text("defaults: [trainer: mine]\n", encoding="utf-8")
    (tmp_path / "trainer").mkdir()
    file = tmp_path / "trainer" / "mine.yaml"
    file.write_bytes(data)
    overrides = ["trainer=mine"] if "UTF" in what else []  # such an error names no file

    with pytest.raises(ConfigError) as caught:
        read(
            composed(*overrides, config_name="own", config_dir=tmp_path),
            make_catalog(LAUNCH_ONLY, str(tmp_path)),
        )

    assert what in caught.value.what
    assert caught.value.where[0].startswith(f"{file}{line}")


@pytest.mark.parametrize(
    ("path", "todo"),
    [
        ("trainer/mine.yml", "rename {}/trainer/mine.yml: options end in .yaml"),
        ("mine.yaml", "move {0}/mine.yaml to {0}/trainer/mine.yaml"),
    ],
)
def test_an_option_in_the_wrong_place_is_found(tmp_path: Path, path: str, todo: str) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "own.yaml").write_text("defaults: [trainer: default]\n", encoding="utf-8")
    (tmp_path / path).write_text("steps: 2\n", encoding="utf-8")

    with pytest.raises(ConfigError, match="no such option") as caught:
        composed("trainer=mine", config_name="own", config_dir=tmp_path)

    assert caught.value.todo == todo.format(tmp_path)


def test_an_option_that_a_file_asks_for_is_refused_with_that_file(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "own.yaml").write_text("defaults: [trainer: default]\n", encoding="utf-8")
    asking = tmp_path / "trainer" / "mine.yaml"
    asking.write_text("defaults: [defualt]\nsteps: 2\n", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        composed("trainer=mine", config_name="own", config_dir=tmp_path)

    assert caught.value.where == (str(asking),)
    assert caught.value.todo == "did you mean trainer=default?"


def test_option_files_that_stand_for_values_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    lines = ["name: gpt", "a0: &a0 [1, 1, 1, 1]"]
    for level in range(1, 40):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 4)}]")
    (tmp_path / "model" / "mine.yaml").write_text("\n".join(lines), encoding="utf-8")

    with pytest.raises(ConfigError, match="expand to a value of extreme size") as refused:
        composed("model=mine", config_dir=tmp_path)

    assert refused.value.where == (str(tmp_path / "model" / "mine.yaml"),)


@pytest.mark.parametrize("kind", ["pipe", "huge"])
def test_an_option_that_never_ends_is_not_read(tmp_path: Path, kind: str) -> None:
    (tmp_path / "trainer").mkdir()
    file = tmp_path / "trainer" / "mine.yaml"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        with file.open("wb") as opened:
            opened.truncate(2**42)  # of which nothing is on the disk

    what = "no such option" if kind == "pipe" else "too large"
    with pytest.raises(ConfigError, match=what) as no:
        composed("trainer=mine", config_dir=tmp_path)

    assert kind == "pipe" or no.value.where == (str(file),)
