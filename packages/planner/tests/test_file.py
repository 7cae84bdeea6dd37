"""Strategies from files: read back as written, edited, and refused with what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_requests import assert_legal, request

from sbp_core.errors import ConfigError
from sbp_core.plugins.kinds import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.strategy_yaml import to_yaml
from sbp_planner.configs import FileConfig, ManualConfig
from sbp_planner.file import build
from sbp_planner.manual import build as build_manual


@pytest.fixture(scope="module")
def asked() -> PlanRequest:
    return request((2,), ("data",))


@pytest.fixture(scope="module")
def made(asked: PlanRequest) -> Strategy:
    pins = {"batch": "S(0)", "use:batch": "S(0)", "activations": "S(0)", "parameters": "B"}
    return build_manual(ManualConfig(pins=pins)).plan(asked)


def from_file(path: Path, asked: PlanRequest, *, other_graph: bool = False) -> Strategy:
    return build(FileConfig(path=str(path), other_graph=other_graph)).plan(asked)


@pytest.mark.parametrize("name", ["strategy.yaml", "strategy.json"])
def test_a_strategy_is_read_back_as_it_was(
    tmp_path: Path, asked: PlanRequest, made: Strategy, name: str
) -> None:
    path = tmp_path / name
    path.write_text(to_yaml(made)) if path.suffix == ".yaml" else made.save(path)

    found = from_file(path, asked)

    assert replace(found, planner=made.planner, report=made.report) == made
    assert found.report["predicted_step_s"] == made.report["predicted_step_s"]
    assert found.report["explanation"] == [f"as {path} says, made by planner manual"]


def test_an_edit_is_obeyed(tmp_path: Path, asked: PlanRequest, made: Strategy) -> None:
    path = tmp_path / "strategy.yaml"
    before = "embed.positions.weight: (B)"
    text = to_yaml(made)
    assert before in text
    path.write_text(text.replace(before, before.replace("B", "S(0)")))

    found = from_file(path, asked)

    assert str(found.storage["embed.positions.weight"].sbp) == "S(0)"
    assert_legal(asked.graph, found)
    assert found.report["predicted_boxing_bytes"] > made.report["predicted_boxing_bytes"]


def test_a_strategy_for_another_mesh_is_refused(tmp_path: Path, made: Strategy) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text(to_yaml(made))

    with pytest.raises(ConfigError, match="and the mesh is") as caught:
        from_file(path, request((4,), ("data",)))

    assert caught.value.where[0] == f"planner.path={path}"


def test_a_strategy_for_another_graph_is_refused_unless_asked_for(
    tmp_path: Path, asked: PlanRequest, made: Strategy
) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text(to_yaml(replace(made, graph_hash="0123")))

    with pytest.raises(ConfigError, match="made for another graph"):
        from_file(path, asked)
    found = from_file(path, asked, other_graph=True)

    assert found.graph_hash == made.graph_hash


def test_a_strategy_for_other_micro_batches_is_refused(
    tmp_path: Path, asked: PlanRequest, made: Strategy
) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text(to_yaml(replace(made, num_micro_batches=3, in_flight=(3,))))

    with pytest.raises(ConfigError, match="for 3 micro-batches, the step has 2"):
        from_file(path, asked)


@pytest.mark.parametrize("name", ["strategy.yaml", "strategy.json"])
def test_names_that_are_too_many_or_lacking_are_refused(
    tmp_path: Path, asked: PlanRequest, made: Strategy, name: str
) -> None:
    def written(strategy: Strategy) -> Path:
        path = tmp_path / name
        path.write_text(to_yaml(strategy)) if path.suffix == ".yaml" else strategy.save(path)
        return path

    weight = made.storage["head.weight"]
    fewer = {key: value for key, value in made.storage.items() if key != "head.weight"}

    with pytest.raises(ConfigError, match=r"head\.weight"):
        from_file(written(replace(made, storage=fewer)), asked)
    with pytest.raises(ConfigError, match=r"haed\.weight"):
        from_file(written(replace(made, storage={**made.storage, "haed.weight": weight})), asked)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("lost.yaml", None, "No such file"),
        ("a.yaml", "[1, 2", "this is no YAML"),
        ("a.yaml", "planner: manual", "has no"),
        ("a.json", "{", "this is no JSON"),
        ("a.json", json.dumps({"format": 1}), "the strategy cannot be used"),
    ],
)
def test_what_is_no_strategy_is_refused_with_the_file(
    tmp_path: Path, asked: PlanRequest, name: str, text: str | None, says: str
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=says) as caught:
        from_file(path, asked)

    assert caught.value.where[0] == f"planner.path={path}"
