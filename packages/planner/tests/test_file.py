"""Strategies from files: read back as written, edited, and refused with what is wrong with them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from plan_requests import assert_legal, request

from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphVariant
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.strategy_yaml import to_yaml
from sbp_core.testing.graphs import cluster, mlp
from sbp_planner.configs import FileConfig, ManualConfig
from sbp_planner.file import FilePlanner
from sbp_planner.manual import ManualPlanner


@pytest.fixture(scope="module")
def asked() -> PlanRequest:
    return request((2,), ("data",))


@pytest.fixture(scope="module")
def made(asked: PlanRequest) -> Strategy:
    pins = {"batch": "S(0)", "use:batch": "S(0)", "activations": "S(0)", "parameters": "B"}
    return ManualPlanner(ManualConfig(pins=pins)).plan(asked)


def from_file(path: Path, asked: PlanRequest, *, other_graph: bool = False) -> Strategy:
    return FilePlanner(FileConfig(path=str(path), allow_other_graph=other_graph)).plan(asked)


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

    with pytest.raises(ConfigError, match="and the run has") as caught:
        from_file(path, request((4,), ("data",)))

    assert caught.value.where[0] == f"planner.path={path}, line 3"


@pytest.mark.slow
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
    ("name", "text", "says", "place"),
    [
        ("a.yaml", "", "the file is empty", ""),
        ("a.yaml", "[1, 2", "this is no YAML", ", line 1, column 6"),
        ("a.yaml", "planner: manual\n\tgraph_hash: 1", "this is no YAML", ", line 2, column 1"),
        ("a.yaml", "planner: manual\nplanner: x", "'planner' occurs twice", ", line 2, column 1"),
        ("a.yaml", "planner: 2001-99-99", "'2001-99-99' cannot be read", ", line 1, column 10"),
        ("a.yaml", "planner: a\nin_flight: \1", "no YAML: the character", ", line 2"),
        ("a.yaml", "planner: manual", "has no", ", line 1"),
        ("a.yaml", "planner: manual\nstage: []", "has no place for 'stage'", ", line 2"),
        ("a.yaml", "storage:\n  a: &x (B)\n  b: *x", r"a reference \(\*\)", ", line 3, column 6"),
        ("a.yaml", "storage:\n  haed.weight: (B)", "'haed.weight'", ", line 2"),
        ("a.yaml", "storage:\n  blocks.{3-0}.x: (B)", "ends before it begins", ", line 2"),
        ("a.yaml", "nodes:\n  head:\n\n    mn: (B)", "'head.mn'", ", line 4"),
        ("a.yaml", "nodes:\n  head: 7", "nodes.head is 7", ", line 2"),
        ("a.yaml", "nodes:\n  head:\n    1: (B)", "a name that is no text: 1", ", line 3"),
        ("a.yaml", "nodes:\n  head:\n    zz*: (B)", r"'head.zz\*' decides nothing", ", line 3"),
        ("a.json", "{", "this is no JSON", ", line 1, column 2"),
        ("a.json", json.dumps({"format": 1}), "the strategy cannot be used", ", line 1"),
    ],
)
def test_what_is_no_strategy_is_refused_with_the_file_and_the_line(
    tmp_path: Path, asked: PlanRequest, name: str, text: str, says: str, place: str
) -> None:
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(ConfigError, match=says) as caught:
        from_file(path, asked)

    assert caught.value.where[0] == f"planner.path={path}{place}"


def edited_line(text: str, section: str, name: str, decision: str) -> tuple[str, int]:
    """Return a strategy's file with another decision, and the line in which it stands."""
    lines = text.splitlines()
    start = lines.index(f"{section}:")
    number = next(i for i in range(start, len(lines)) if lines[i].strip().startswith(f"{name}:"))
    before = lines[number].partition(":")[0]
    lines[number] = f"{before}: {decision}"
    return "\n".join(lines), number + 1


@pytest.mark.slow(but=5)
@pytest.mark.parametrize(
    ("section", "name", "decision", "says", "accepted"),
    [
        ("nodes", "gelu", "(S(2)) (B) -> (S(2))", "takes 1 tensor and gives 1", "one nd-SBP"),
        ("nodes", "gelu", "(S(7)) -> (S(7))", r"S\(7\) splits a dim", "S(0), S(1), S(2)"),
        ("nodes", "gelu", "(B, B) -> (B, B)", "2 entries for a mesh of 1 ax", "one entry"),
        ("nodes", "gelu", "(B)", "is no signature", "->"),
        ("nodes", "gelu", "(B) -> (P)", "does not give B -> P", "S(1) -> S(1)"),
        ("nodes", "gelu", "7", "is 7", "text"),
        ("nodes", "gelu", "(B) -> (B) @3", "on stage 3 of 1", "@0"),
        ("storage", "head.weight", "(S(7))", r"S\(7\) splits a dim", "S(0), S(1)"),
        ("storage", "head.weight", "(B, B)", "2 entries for a mesh of 1 ax", "one entry"),
        ("storage", "head.weight", "(Q)", "'Q' is no SBP", "S(dim)"),
        ("storage", "head.weight", "S(0)", "outside of parentheses", "(S(0), B)"),
    ],
)
def test_a_decision_that_cannot_be_is_refused_with_its_line_and_its_name(
    tmp_path: Path,
    asked: PlanRequest,
    made: Strategy,
    section: str,
    name: str,
    decision: str,
    says: str,
    accepted: str,
) -> None:
    text, line = edited_line(to_yaml(made), section, name, decision)
    path = tmp_path / "strategy.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=says) as caught:
        from_file(path, asked)

    assert caught.value.where[0] == f"planner.path={path}, line {line}"
    assert name in str(caught.value)
    assert accepted in caught.value.accepted


def test_a_path_that_is_no_file_is_refused_before_anything_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    for path, reason in (("lost.yaml", "No such file"), (".", "it is a folder"), ("a\0b", "null")):
        with pytest.raises(ConfigError, match=f"^path=.* cannot be read: .*{reason}") as caught:
            FileConfig(path=path)
        assert caught.value.todo == "sbp-plan out=FILE writes one"


def test_a_path_that_is_no_file_is_answered_with_the_nearest_run_or_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for age, run in enumerate(("2026-01-02_03-04-05", "first", "2025-01-01_00-00-00")):
        file = tmp_path / "runs" / run / "strategy.yaml"
        file.parent.mkdir(parents=True)
        file.write_text("planner: manual")
        os.utime(file, (1000 - age, 1000 - age))

    with pytest.raises(ConfigError) as near:
        FileConfig(path="runs/frst/strategy.yaml")
    with pytest.raises(ConfigError) as far:
        FileConfig(path="x")

    assert near.value.todo == "did you mean 'runs/first/strategy.yaml'?"
    assert far.value.todo == "the newest run has 'runs/2026-01-02_03-04-05/strategy.yaml'"


class Family:
    """A step that may have one micro-batch, or two, in which it is another graph."""

    variant = GraphVariant()
    may_recompute = may_slice = False

    def __init__(self, *micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        return mlp((8, 8), batch=16, num_micro_batches=variant.num_micro_batches)


def of_two(family: Family | None) -> PlanRequest:
    mesh = Placement.grid((2,), ("data",))
    graph = mlp((8, 8), batch=16, num_micro_batches=1 if family else 2)
    return PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), family=family)


@pytest.mark.parametrize("is_said", [True, False])
def test_micro_batches_that_are_left_open_are_those_of_the_file(
    tmp_path: Path, is_said: bool
) -> None:
    two = GraphVariant(num_micro_batches=2)
    made = ManualPlanner(ManualConfig(pins={"batch": "S(0)"})).plan(of_two(None))
    path = tmp_path / "strategy.yaml"
    path.write_text(to_yaml(replace(made, variant=two if is_said else None)))

    found = from_file(path, of_two(Family(1, 2)))

    assert found.variant == two
    assert found.nodes == made.nodes
    with pytest.raises(ConfigError, match="for 2 micro-batches, the step has 1"):
        from_file(path, of_two(Family(1)))
