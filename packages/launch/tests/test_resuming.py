"""`sbp-train resume=RUN` goes on with the settings of that run, and what is given instead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped] # its stubs are a package of their own
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given as property_of
from hypothesis import settings as examples
from hypothesis import strategies as st
from omegaconf import OmegaConf

from sbp_core.errors import ConfigError
from sbp_core.plugins import discover
from sbp_launch.apps.train import expand_resume
from sbp_launch.run.folder import resume_command, save_run
from sbp_launch.settings.catalog import PRIMARY, Catalog
from sbp_launch.settings.compose import compose, read
from sbp_launch.settings.config import Application, ComposedConfig
from sbp_launch.settings.resumed import literal, quote

OWN: dict[str, Any] = {
    **{one: {"name": "toy"} for one in ("model", "data", "boxing", "runtime", "planner")},
    "cluster": {"name": "local", "mesh": [2], "axes": None},
    "launcher": {"name": "auto"},
    "storage": {"name": "local", "folder": "kept"},
    "trainer": {"steps": 40, "epochs": None, "seed": 3, "resume": "/elsewhere"},
}


def run_folder(tmp_path: Path, **values: Any) -> Path:
    folder = tmp_path / "a run"
    folder.mkdir()
    save_run(ComposedConfig(values={**OWN, **values}, files={}, overrides=()), folder)
    return folder


def composed(arguments: Sequence[str]) -> ComposedConfig:
    """Compose what `expand_resume` returns."""
    *overrides, flag, name = expand_resume(arguments)
    assert flag == "--config-name"
    catalog = Catalog(registry=discover(), folders=(PRIMARY,))
    app: Application[Any] = Application(
        name="x",
        about="x",
        config_name=name,
        check=lambda composed, registry: composed,
        task=lambda *given: None,
    )
    config = compose(catalog, app, overrides)
    assert config.hydra.run.dir == str(Path(arguments[0].partition("=")[2].strip("'\"")))
    return read(config, catalog)


def trainer_of(config: ComposedConfig) -> dict[str, Any]:
    trainer = config.values["trainer"]
    assert isinstance(trainer, dict)
    return trainer


def test_a_command_line_without_it_stays() -> None:
    assert expand_resume(["-m", "trainer.resume=auto", "x"]) == ["-m", "trainer.resume=auto", "x"]


def test_it_stands_for_the_settings_of_the_run_in_its_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)

    found = composed([f"resume={folder}"])

    assert {group: found.values[group] for group in OWN} == {
        **OWN,
        "trainer": {**OWN["trainer"], "resume": "auto"},
    }
    assert found.files["storage"] == str(folder / "config.yaml")


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ("trainer.steps=50", {"steps": 50, "epochs": None}),
        ("trainer.epochs=2", {"steps": None, "epochs": 2}),
        ("+trainer.steps=50", {"steps": 50, "epochs": None}),
        ("+trainer.hours=1", {"steps": None, "hours": 1}),
        ("trainer.seed=4", {"steps": 40, "seed": 4}),
    ],
)
def test_a_setting_that_is_given_counts_instead(
    tmp_path: Path, given: str, settings: dict[str, Any]
) -> None:
    found = trainer_of(composed([f"resume={run_folder(tmp_path)}", given]))

    assert {name: found[name] for name in settings} == settings


def test_another_option_knows_nothing_of_the_settings_of_the_one_before(tmp_path: Path) -> None:
    found = composed([f"resume={run_folder(tmp_path)}", "launcher=slurm", "storage=local"])

    assert found.values["storage"] == {"name": "local", "folder": "checkpoints"}
    assert found.files["launcher"] == "sbp_launch/conf/launcher/slurm.yaml"


@pytest.mark.parametrize(
    "other",
    ["-m", "--multirun", "trainer.resume=auto", "hydra.run.dir=x", "resume=another", "-cn"],
)
def test_what_says_otherwise_is_refused(tmp_path: Path, other: str) -> None:
    with pytest.raises(ConfigError, match="resume") as refused:
        expand_resume([f"resume={run_folder(tmp_path)}", other])
    assert other in str(refused.value)


def test_of_hydra_nothing_is_taken_from_a_run_folder(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text("- +hydra.job_logging.root.level=DEBUG\n")

    assert not any("job_logging" in text for text in expand_resume([f"resume={folder}"]))


@pytest.mark.parametrize(
    "values",
    [{"hydra": {"job": {"chdir": True}}}, {"storage": {"defaults": [{"/hydra/launcher": "x"}]}}],
)
def test_settings_of_hydra_in_the_settings_of_a_run_are_refused(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    folder = run_folder(tmp_path)
    (folder / "config.yaml").write_text(yaml.safe_dump({**OWN, **values}))

    with pytest.raises(ConfigError, match=r"hydra|storage\.defaults") as refused:
        expand_resume([f"resume={folder}"])

    assert "config.yaml" in str(refused.value)


def test_commands_of_a_batch_script_are_given_again(tmp_path: Path) -> None:
    launcher = {"name": "slurm", "nodes": 2, "parameters": {"setup": ["touch x"], "comment": "c"}}
    folder = run_folder(tmp_path, launcher=launcher)

    with pytest.raises(ConfigError, match=r"launcher\.parameters may hold commands.*touch x"):
        expand_resume([f"resume={folder}"])

    found = composed([f"resume={folder}", "+launcher.parameters={slurm_account: lab}"])
    assert found.values["launcher"] == {
        "name": "slurm",
        "nodes": 2,
        "parameters": {"slurm_account": "lab"},
    }


@pytest.mark.parametrize("text", ["[1]", "[", "x", "elsewhere: {}"])
def test_a_folder_without_the_settings_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    folder = run_folder(tmp_path)
    (folder / "config.yaml").write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="no run to continue") as refused:
        expand_resume([f"resume={folder}"])
    assert str(folder) in str(refused.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to continue"):
        expand_resume([f"resume={tmp_path / 'x'}"])


def test_the_command_that_goes_on_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert resume_command(Path("/runs/first")) == "sbp-train resume=runs/first"
    monkeypatch.chdir("/usr")
    assert resume_command(Path("/usr")) == "sbp-train resume=/usr"
    monkeypatch.chdir("/")
    assert resume_command(Path("/a run/${x}")) == "sbp-train 'resume=a run/${x}'"


@examples(derandomize=True, max_examples=50)
@property_of(value=st.recursive(st.text("\\${}x'"), st.lists))
def test_of_a_literal_every_text_stays(value: object) -> None:
    made = OmegaConf.create({"value": literal(value)})

    assert OmegaConf.to_container(made, resolve=True) == {"value": value}


@pytest.mark.parametrize("text", ["a", "it's", "\\", "\\'", "${x}", "\\${x}\\\\", "a,b: [c]", '"'])
def test_a_text_in_quotes_is_that_text(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"out={quote(text)}"])

    assert OmegaConf.create({"out": str(override.value())}).out == text


@pytest.mark.parametrize(
    "text", ["0", "007", "1e3", ".5", "-1", "1_0", "null", "True", "NaN", "inf"]
)
def test_a_text_that_looks_like_a_number_or_a_constant_stays_a_text(text: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"out={quote(text)}"])

    assert override.value() == text


@pytest.mark.parametrize("text", ["runs/first", "../a-b_c.d/1e3", "./1", "/1", "nullable", "infra"])
def test_a_plain_path_stands_without_quotes(text: str) -> None:
    assert quote(text) == text
