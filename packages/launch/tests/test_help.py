"""The text of `--help`, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginSource, discover
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.config import Application, ComposedConfig
from sbp_launch.settings.help import overrides_of, render_help, render_topics, split_topics
from sbp_launch.settings_page import page, without_comment

CATALOG = make_catalog(
    discover([PluginSource(name="launch", value="sbp_launch.plugin", distribution="sbp-launch")])
)
APP = Application(name="sbp-x", about="be it", config_name="config", check=print, task=print)

COMPOSED = ComposedConfig(
    values={
        "trainer": {"steps": 300, "schedule": {"decay": "constant", "final": 0.0}},
        "optimizer": {"name": "sgd", "lr": 0.1, "groups": {"*.bias": {"weight_decay": 0.0}}},
    },
    files={
        "trainer": "sbp_launch/conf/trainer/default.yaml",
        "optimizer": "sbp_launch/conf/optimizer/sgd.yaml",
    },
    overrides=(),
)


def lines_on(*topics: str) -> list[str]:
    return render_topics(APP, COMPOSED, CATALOG, topics).splitlines()


@pytest.mark.parametrize(
    ("arguments", "kept", "topics"),
    [
        (["--help"], ["--help"], []),
        (["planner=osdp", "--help"], ["planner=osdp", "--help"], []),
        (["-h", "trainer", "planner=osdp"], ["-h"], ["trainer", "planner=osdp"]),
        (["--help", "lr", "--config-dir", "x"], ["--help", "--config-dir", "x"], ["lr"]),
        (["trainer.steps=5"], ["trainer.steps=5"], []),
    ],
)
def test_the_words_behind_help_are_topics(
    arguments: list[str], kept: list[str], topics: list[str]
) -> None:
    assert split_topics(arguments) == (kept, topics)


def test_an_option_is_a_topic_with_and_without_its_group() -> None:
    assert overrides_of(["optimizer=sgd", "sgd", "trainer", "lr"], CATALOG) == [
        "optimizer=sgd",
        "optimizer=sgd",
    ]


def test_a_group_is_explained_setting_by_setting() -> None:
    assert lines_on("trainer")[3:] == [
        "  trainer.steps=300                 optimizer updates; 300 if no budget is given",
        "  trainer.schedule:                 factor of the optimizer's lr over time",
        "  trainer.schedule.decay=constant   constant, linear, cosine, inverse_sqrt, wsd",
        "  trainer.schedule.final=0.0        factor at the end",
    ]


def test_one_setting_is_explained_with_what_it_takes() -> None:
    told = " ".join(" ".join(lines_on("trainer.steps")).split())
    assert told.endswith("300 if no budget is given (takes an integer or null)")
    assert lines_on("lr")[0] == "  optimizer.lr=0.1                  learning rate (takes a number)"


@pytest.mark.parametrize("topic", ["trainer.callbacks", "early_stop"])
def test_callbacks_are_explained_by_what_their_dataclasses_say(topic: str) -> None:
    values = {**COMPOSED.values, "trainer": {"callbacks": []}}
    lines = render_topics(APP, replace(COMPOSED, values=values), CATALOG, [topic]).splitlines()

    assert (
        "callback early_stop, of sbp-launch: end a run whose evaluations no longer improve" in lines
    )
    told = " ".join(" ".join(lines).split())
    assert "patience=3 Evaluations without an improvement after which the run ends, >= 1." in told
    assert "(takes 'min' or 'max')" in told


def test_a_mapping_that_is_too_long_for_a_line_stands_below_its_key() -> None:
    lines = lines_on("optimizer")

    assert lines[-1] == "      '*.bias': {weight_decay: 0.0}"
    assert any(line.startswith("  optimizer.groups:     ") for line in lines)


@pytest.mark.parametrize("topic", ["trainr", "trainer.stpes", "optimizer=sdg"])
def test_an_unknown_topic_is_refused_with_the_nearest(topic: str) -> None:
    with pytest.raises(ConfigError, match="no such group, option or setting") as caught:
        render_topics(APP, COMPOSED, CATALOG, [topic.replace("optimizer=sdg", "optimzer=sgd")])

    assert caught.value.todo.startswith("did you mean --help ")


@pytest.mark.parametrize("topic", ["betas", "optimizer.betas"])
def test_a_setting_of_another_option_is_answered_with_the_options_that_take_it(topic: str) -> None:
    with pytest.raises(ConfigError, match="no chosen option has this setting") as caught:
        render_topics(APP, COMPOSED, CATALOG, [topic])

    named = caught.value.todo.removeprefix("try --help ").split(" or --help ")
    for choice in named:
        group, _, option = choice.partition("=")
        assert topic.rpartition(".")[2] in CATALOG.comments(f"{group}/{option}")


@pytest.mark.slow
def test_the_page_of_settings_names_those_without_a_comment(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "own.yaml").write_text("# Own.\nsteps: 5\nseed: 1  # of it\n")
    catalog = make_catalog(CATALOG.registry, str(tmp_path))

    assert without_comment(catalog) == ["trainer/own.yaml: trainer.steps"]
    assert "| `trainer.seed` | `1` | an integer | of it |" in page(catalog)
    assert "| `patience` | `3` | an integer | Evaluations without an improvement" in page(catalog)


def test_the_overview_fits_its_width_and_marks_what_is_chosen() -> None:
    text = render_help(APP, COMPOSED, CATALOG)

    assert all(len(line) <= 100 for line in text.splitlines())
    assert "    * sgd                      Stochastic gradient descent with momentum" in text
