"""The apps from the outside: exit codes, messages, folders, and what they may not import."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from toys import LAUNCHER, TOYS, Outcome, write_distribution

App = Callable[..., Outcome]

TRAINER = "sbp_launch/conf/trainer/default.yaml"
COMPILE = "sbp_launch/conf/compile/default.yaml"
CLUSTER = "sbp_launch/conf/cluster/local.yaml"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trainer.stepz=5"], ["trainer.stepz", TRAINER, "did you mean 'trainer.steps'"]),
        (["+trainer.stepz=5"], ["trainer.stepz", TRAINER, "did you mean 'trainer.steps'"]),
        (["steps=5"], ["'steps'", "did you mean trainer.steps=5?"]),
        (["trainer.lr=1"], ["'trainer.lr'", TRAINER, "did you mean optimizer.lr=1?"]),
        (["model.seed=1"], ["'model.seed'", "did you mean trainer.seed=1?"]),
        (["trainer.steps=5", "trainer.steps=7"], ["trainer.steps=5 and trainer.steps=7"]),
        (["-m", "logger=csv,jsonl", "logger=none"], ["logger=csv,jsonl and logger=none"]),
        (["trainr.steps=5"], ["trainr.steps", "did you mean 'trainer.steps'"]),
        (["plannr=toy"], ["plannr", "did you mean 'planner'"]),
        (["+foo=1"], ["'foo'", "optimizer, planner"]),
        (
            ["planner=tyos/even"],
            ["planner=tyos/even", "did you mean planner=toys/even"],
        ),
        (["planner/toys=odd"], ["planner/toys", "did you mean planner=toys/odd"]),
        (["boxing=lcal"], ["boxing=lcal", "did you mean boxing=local"]),
        (["model=strange"], ["toyy", "toy_package/conf/model/strange.yaml", "did you mean 'toy'"]),
        (
            ["model=hollow"],
            [
                "model.width is not set",
                "toy_package/conf/model/hollow.yaml",
                "accepted here: the columns, 8 or 16",
                "set model.width=VALUE, or choose model=hollow/filled",
            ],
        ),
        (["model=hollow/shown"], ["to fix it: set model.width=COLUMNS"]),
        (["model=lost"], ["model.width", "no.such.key", "toy_package/conf/model/lost.yaml"]),
        (["model.width=0"], ["model.width=0", "toy_package/conf/model/toy.yaml"]),
        (["model.depth=3"], ["model.depth", "+model.depth=3"]),
        (["cluster.mesh=[2,3]", "cluster.world_size=4"], ["cluster.mesh=[2, 3]", CLUSTER]),
        (["cluster.axes=[data]"], ["cluster.axes=['data']", "null for data,tensor", CLUSTER]),
        (["cluster.mesh=[1,1,1,1]"], ["cluster.axes=null", "cluster.axes=[", CLUSTER]),
        (["cluster.mesh=[]"], ["cluster.mesh=[]", CLUSTER]),
        (["cluster.mesh=[0,2]"], ["cluster.mesh=[0, 2]", CLUSTER]),
        (["cluster.mesh=two"], ["cluster.mesh", "a list", CLUSTER]),
        (["cluster.mesh=4"], ["cluster.mesh is 4", "cluster.mesh=[4]", CLUSTER]),
        (
            ["trainer.batch_size=10", "trainer.micro_batches=4"],
            ["trainer.batch_size=10", "1, 2, 5, 10", TRAINER, "trainer.micro_batches=4"],
        ),
        (["trainer.steps=abc"], ["trainer.steps", "'abc'", "an integer", TRAINER]),
        (["trainer.steps=0"], ["trainer.steps=0", "an integer >= 1", TRAINER]),
        (["compile.plugins=[fuse]"], ["compile.plugins=fuse", "'fuse'", COMPILE]),
        (["compile.passes.slices={head: {count: 1}}"], ["slices.head", "an integer >= 2", COMPILE]),
        (["compile.passes.recompute.memory_bytes=-1"], ["memory_bytes >= 0", COMPILE]),
        (
            ["compile.passes.recompue.marked=false"],
            ["'compile.passes.recompue'", COMPILE, "did you mean 'compile.passes.recompute'"],
        ),
        (
            ["compile.passes.recompute.markd=false"],
            ["did you mean 'compile.passes.recompute.marked'", COMPILE],
        ),
        (
            ["compile.passes.mixed_precision.dtype=float16"],
            ["+compile.passes.mixed_precision.dtype=float16", COMPILE],
        ),
        (
            ["compile.passes.mixed_precision.dtpe=float16"],
            ["did you mean 'compile.passes.mixed_precision.dtype'", COMPILE],
        ),
        (["compile.autocast=bfloat"], ["accepted here: '' (empty), bfloat16, float16"]),
        (
            ["+optimizer.groups={*.bias: {weight_decay: -1.0}}"],
            ["optimizer.groups.*.bias: weight_decay=-1.0 is out of range"],
        ),
        (
            ["trainer.dtype=float16"],
            ["trainer.dtype", "float32, float64", TRAINER, "compile.autocast=bfloat16"],
        ),
        (["trainer.steps.x=1"], ["trainer.steps.x", TRAINER]),
        (["optimizer.lr=-1"], ["optimizer.lr=-1", "sbp_launch/conf/optimizer/adamw.yaml"]),
        (["~logger"], ["logger"]),
        (["logger=null"], ["Got NoneType"]),
        (["trainer.steps=1,2"], ["trainer.steps=1,2", "--multirun"]),
        (["trainer.steps=[1,"], ["trainer.steps=[1,", "key=value"]),
        (["-m", "trainer.steps=5,0"], ["trainer.steps=0", TRAINER]),
        (["--config-name", "nope"], ["nope"]),
        (["--config-dir", "nope"], ["nope"]),
        (["hydra.searchpath=[file:///no/such/folder]"], ["/no/such/folder"]),
        (["hydra.run.dir=a/${x}"], ["hydra.run.dir: Interpolation key 'x'", "as \\${...}"]),
        (["hydra.run.dir=a/\\${x}"], ["the folder a/${x} cannot be written to", "rename it"]),
        (["--cfg", "job", "trainer.stepz=5"], ["trainer.stepz", "'trainer.steps'"]),
    ],
)
def test_a_wrong_setting_is_answered_before_torch_is_loaded_with_exit_code_2(
    app: App, arguments: list[str], says: list[str]
) -> None:
    outcome = app(*arguments)

    assert outcome.code == 2, outcome.err
    assert [text for text in says if text not in outcome.err] == []
    assert "Traceback" not in outcome.err
    assert not outcome.torch
    assert outcome.made == []


@pytest.mark.slow
def test_a_run_gets_its_config_and_its_own_folder(app: App) -> None:
    outcome = app("trainer.steps=7", "cluster.mesh=[1,2]", "model.width=5")

    result = json.loads(outcome.out)
    folder = Path(result.pop("run_folder"))
    assert outcome.code == 0, outcome.err
    assert result == {
        "model": ["toy", {"width": 5}],
        "planner": "toy",
        "steps": 7,
        "mesh": [1, 2],
    }
    assert folder.parent == outcome.folder / "runs"
    assert (folder / ".hydra" / "overrides.yaml").is_file()
    assert outcome.made == ["runs"]


@pytest.mark.slow
def test_an_option_in_a_folder_of_its_group_is_chosen_by_its_path(app: App) -> None:
    outcome = app("planner=toys/odd")

    assert json.loads(outcome.out)["planner"] == "toys"


@pytest.mark.slow
def test_planning_leaves_no_folder_behind(app: App) -> None:
    outcome = app(config="plan")

    assert outcome.code == 0, outcome.err
    assert outcome.made == []


@pytest.mark.slow
def test_a_sweep_runs_one_job_for_each_combination(app: App) -> None:
    outcome = app("trainer.steps=1,2", "-m", "model.width=range(3,5)")

    jobs = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    assert outcome.code == 0, outcome.err
    assert [(job["steps"], job["model"][1]["width"]) for job in jobs] == [
        (1, 3),
        (1, 4),
        (2, 3),
        (2, 4),
    ]
    assert len({job["run_folder"] for job in jobs}) == 4


@pytest.mark.slow
def test_a_sweep_goes_on_when_a_run_has_failed_and_ends_with_a_table(app: App) -> None:
    outcome = app("-m", "trainer.steps=1,2,3", "trainer.seed=5", fail=True, goes_on=True)

    assert outcome.code == 1
    assert outcome.err.strip() == "sbp-toy: it does not fit\n  in rank 3"
    jobs = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    assert [job["steps"] for job in jobs] == [2, 3]
    head, _, *rows, failed = outcome.out.rstrip().splitlines()[-6:]
    assert head.split() == ["run", "trainer.steps", "folder"]  # none has come to a first step
    assert [row.split()[:2] for row in rows] == [["0", "1"], ["1", "2"], ["2", "3"]]
    assert [row.split()[-1] for row in rows] == ["0", "1", "2"]
    assert failed == "run 0 failed: it does not fit"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Folder with a plugin of Hydra whose launcher runs jobs in other processes."""
    plugin = tmp_path / "site" / "hydra_plugins" / "elsewhere.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(LAUNCHER, "utf-8")
    return plugin.parent.parent


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("config", ["config", "plan"])
def test_a_sweep_whose_runs_are_in_other_processes_goes_on_and_ends_with_the_same_table(
    app: App, elsewhere: Path, config: str
) -> None:
    launcher = "hydra.launcher._target_=hydra_plugins.elsewhere.Elsewhere"

    outcome = app("-m", "trainer.steps=1,2", launcher, config=config, beside=elsewhere,
                  fail=True, goes_on=True)  # fmt: skip

    assert outcome.code == 1
    assert outcome.err.strip() == "sbp-toy: it does not fit\n  in rank 3"
    head, _, *rows, failed = outcome.out.rstrip().splitlines()[-5:]
    assert head.split() == ["run", "trainer.steps", "folder"]
    assert [row.split() for row in rows] == [["0", "1", "0"], ["1", "2", "1"]]
    assert failed == "run 0 failed: it does not fit"
    (sweep,) = outcome.folder.glob("runs/*")
    assert not [path for path in sweep.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_a_run_whose_process_was_ended_is_told_of_too(app: App, elsewhere: Path) -> None:
    launcher = "hydra.launcher._target_=hydra_plugins.elsewhere.Elsewhere"

    outcome = app("-m", "trainer.steps=1,2", launcher, beside=elsewhere,
                  stopped_by=int(signal.SIGHUP), goes_on=True)  # fmt: skip

    assert outcome.code == 1
    assert "run 0 failed: it was stopped" in outcome.out


@pytest.mark.slow
def test_a_signal_ends_a_sweep_and_not_one_run_of_it(app: App) -> None:
    outcome = app("-m", "trainer.steps=2,1,3", stopped_by=int(signal.SIGTERM), goes_on=True)

    jobs = [json.loads(line) for line in outcome.out.splitlines() if line.startswith("{")]
    assert outcome.code == 143
    assert [job["steps"] for job in jobs] == [2]
    assert "run 1 failed: it was stopped" in outcome.out


@pytest.mark.slow
def test_a_run_that_fails_exits_with_1_and_its_message_alone(app: App) -> None:
    outcome = app(fail=True)

    assert outcome.code == 1
    assert outcome.err.strip() == "sbp-toy: it does not fit\n  in rank 3"


@pytest.mark.slow
def test_warnings_of_libraries_bear_their_own_names_and_data_say_how_far_they_are(app: App) -> None:
    outcome = app(warn=True)

    assert outcome.code == 0, outcome.err
    assert outcome.err.splitlines() == [
        "WARNING a.library: it is odd",
        "INFO sbp_models.record_cache: making tokens: 3%",
    ]
    assert "it is" not in outcome.out


@pytest.mark.slow
def test_passes_are_set_on_the_command_line_without_a_plus(app: App) -> None:
    outcome = app(
        "compile.passes.slices={blocks.*: {count: 4}}", "compile.passes.recompute.memory_bytes=5e6"
    )

    assert outcome.code == 0, outcome.err


def test_help_lists_the_options_of_every_group_as_one_types_them(app: App) -> None:
    outcome = app("--help")

    lines = [line.split() for line in outcome.out.splitlines()]
    assert outcome.code == 0, outcome.err
    assert ["toys/odd"] in lines
    assert ["*", "toy", "a", "toy"] in lines
    assert any(line[:1] == ["--multirun,"] for line in lines)
    assert not outcome.torch


@pytest.mark.slow
def test_help_on_a_topic_explains_the_settings_of_the_chosen_option(app: App) -> None:
    outcome = app("trainer.steps=7", "--help", "trainer", "optimizer=sgd")

    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    assert lines[0] == f"trainer=default, of sbp-launch: {TRAINER}"
    assert (
        "  trainer.steps=7                   optimizer updates; 300 if no budget is given" in lines
    )
    assert any(line.startswith("  optimizer.momentum=0.9 ") for line in lines)
    assert not outcome.torch


@pytest.mark.slow
def test_help_on_what_is_not_there_names_the_nearest(app: App) -> None:
    outcome = app("--help", "trainr")

    assert outcome.code == 2
    assert "did you mean --help trainer?" in outcome.err


@pytest.mark.slow
def test_the_config_is_shown_instead_of_run(app: App) -> None:
    outcome = app("--cfg", "job", "trainer.steps=7")

    assert outcome.code == 0, outcome.err
    assert "steps: 7" in outcome.out
    assert outcome.made == []


@pytest.mark.slow
def test_the_search_path_names_the_distribution_of_each_folder(app: App) -> None:
    outcome = app("--info", "searchpath")

    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["|", "sbp-toys", "|", "pkg://toy_package.conf", "|"] in rows
    assert outcome.code == 0, outcome.err


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("sbp-toy planner=toys/", ["planner=toys/even", "planner=toys/odd"]),
        ("sbp-toy optimizer=", ["optimizer=adamw", "optimizer=muon", "optimizer=sgd"]),
        ("sbp-toy plann", ["planner"]),
    ],
)
def test_a_shell_completes_options(app: App, line: str, completions: list[str]) -> None:
    outcome = app(
        "-sc",
        "query=bash",
        defaults=True,
        environment={"COMP_LINE": line, "COMP_POINT": str(len(line))},
    )

    assert outcome.code == 0, outcome.err
    words = outcome.out.split()
    assert [word for word in completions if word not in words] == []
    assert [word for word in words if not word.startswith(line.split()[-1])] == []


@pytest.mark.slow
def test_an_own_config_folder_brings_options(app: App, tmp_path: Path) -> None:
    (tmp_path / "own" / "trainer").mkdir(parents=True)
    (tmp_path / "own" / "trainer" / "short.yaml").write_text("steps: 2\n", encoding="utf-8")

    outcome = app("--config-dir", str(tmp_path / "own"), "trainer=short")

    assert json.loads(outcome.out)["steps"] == 2


def test_a_file_that_is_no_yaml_is_answered_by_its_name(app: App, tmp_path: Path) -> None:
    (tmp_path / "own" / "trainer").mkdir(parents=True)
    (tmp_path / "own" / "trainer" / "odd.yaml").write_text("steps: [2\n", encoding="utf-8")

    outcome = app("--config-dir", str(tmp_path / "own"), "trainer=odd")

    assert outcome.code == 2
    assert "odd.yaml" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_config_folder_that_does_not_exist_is_named_and_stops_nobody(
    app: App, tmp_path: Path
) -> None:
    plugin = """
from sbp_core.plugins import hookimpl
SBP_API_VERSION = 1
@hookimpl
def sbp_config_folders():
    return ["pkg://lost_package.no_such_folder"]
"""
    write_distribution(tmp_path / "site", "sbp-lost", "lost_package", plugin, {})

    fine = app(beside=tmp_path / "site")
    listed = app("--help", beside=tmp_path / "site")

    assert (fine.code, listed.code) == (0, 0), fine.err + listed.err
    warning = (
        "sbp-toy: warning: plugin sbp-lost (sbp-lost): the config folder pkg://lost_package.no"
    )
    assert fine.err.startswith(warning)
    assert "Plugins with problems:\n  sbp-lost (sbp-lost): the config folder" in listed.out


@pytest.mark.slow
@pytest.mark.parametrize("module", ["sbp_launch.apps.train", "sbp_launch.apps.plan"])
def test_the_commands_check_their_settings_before_they_import_torch(
    toys: Path, tmp_path: Path, module: str
) -> None:
    script = (
        f"import sys\nfrom {module} import main\n"
        "try:\n    main()\n"
        "except SystemExit as exit:\n"
        "    sys.exit(99 if 'torch' in sys.modules else exit.code)\n"
    )

    child = subprocess.run(
        [sys.executable, "-c", script, *TOYS, "trainer.stepz=5"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(toys)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert child.returncode == 2, child.stderr
    assert "'trainer.steps'" in child.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_distributions_that_bring_one_option_are_both_named(app: App, tmp_path: Path) -> None:
    plugin = """
from sbp_core.plugins import hookimpl
SBP_API_VERSION = 1
@hookimpl
def sbp_config_folders():
    return ["pkg://twin_package.conf"]
"""
    options = {"planner/toy": "name: toy\n"}
    write_distribution(tmp_path / "site", "sbp-twin", "twin_package", plugin, options)

    refused = app(beside=tmp_path / "site")
    other = app("planner=toys/odd", beside=tmp_path / "site")

    assert refused.code == 2
    assert "sbp-toys" in refused.err
    assert "sbp-twin" in refused.err
    assert other.code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugin", "why"),
    [
        ("x = 1\nraise OSError('it is too old')\n", "OSError: it is too old"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("SBP_API_VERSION = 99\n", "it is written for API version 99"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
    ],
)
def test_a_broken_plugin_is_named_first_and_stops_nobody_who_does_not_ask_for_it(
    app: App, tmp_path: Path, plugin: str, why: str
) -> None:
    options = {"planner/toyy": "name: toyy\n"}
    write_distribution(tmp_path / "site", "sbp-broken", "broken_package", plugin, options)

    fine = app(beside=tmp_path / "site")
    asked = app("planner=toyy", beside=tmp_path / "site")
    perhaps = app("planner=zzz", beside=tmp_path / "site")

    assert fine.code == 0, fine.err
    warning = [line for line in fine.err.splitlines() if "warning" in line]
    assert len(warning) == 1
    assert warning[0].startswith("sbp-toy: warning: plugin sbp-broken (sbp-broken): ")
    assert (asked.code, perhaps.code) == (2, 2)
    by = "the plugin sbp-broken 1.0 that"
    assert asked.err.startswith(f"sbp-toy: planner=toyy: {by} provides it cannot be used: ")
    assert why in asked.err.splitlines()[0]
    assert perhaps.err.startswith(f"sbp-toy: planner=zzz: {by} may provide it cannot be used: ")


@pytest.mark.slow
def test_a_plugin_that_raises_is_named_with_its_own_line_and_without_our_stack(
    app: App, tmp_path: Path
) -> None:
    text = "\n\ndef build(config):\n    return {}['missing']\n"
    (tmp_path / "no_such_module.py").write_text(text, encoding="utf-8")

    told = app(build="planner", beside=tmp_path)
    whole = app(build="planner", beside=tmp_path, environment={"HYDRA_FULL_ERROR": "1"})

    assert (told.code, whole.code) == (1, 1)
    file = tmp_path / "no_such_module.py"
    assert told.err.strip().splitlines() == [
        "sbp-toy: planner 'toy' of sbp-toys 1.0 raised KeyError: 'missing'",
        f"  in {file}:4, in build: return {{}}['missing']",
        "  to fix it: correct the plugin, or its input; HYDRA_FULL_ERROR=1 shows the whole "
        "traceback",
    ]
    assert "Traceback" in whole.err
