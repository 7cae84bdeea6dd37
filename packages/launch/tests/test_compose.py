"""From a command line to plain values, in this process."""

from __future__ import annotations

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginSource, discover
from sbp_launch.compose import MOST_JOBS_CHECKED, session, sweep_jobs

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
    assert sweep_jobs(["planner=glob(*)", "y=1"]) == (("y=1",),)


def test_a_huge_sweep_is_checked_in_part() -> None:
    jobs = sweep_jobs(["x=range(0,1000)", "y=range(0,1000)"])

    assert len(jobs) == MOST_JOBS_CHECKED


def test_an_override_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError):
        sweep_jobs(["x=[1,"])


def test_a_session_knows_groups_options_and_files() -> None:
    with session(LAUNCH_ONLY) as catalog:
        groups = catalog.groups()
        options = catalog.options("optimizer")
        file = catalog.file("optimizer/adamw")
        nowhere = catalog.file("optimizer/nothing")
        owners = catalog.owners("optimizer/adamw")

    assert groups == ("cluster", "compile", "logger", "optimizer", "trainer")
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
        "sgd",
    )
    assert file == "sbp_launch/conf/optimizer/adamw.yaml"
    assert nowhere == ""
    assert owners == ("main",)


def test_sessions_follow_one_another_without_leaving_anything_behind() -> None:
    with session(discover([])) as catalog:
        first = catalog.groups()
    with session(LAUNCH_ONLY) as catalog:
        second = catalog.groups()

    assert first == second
