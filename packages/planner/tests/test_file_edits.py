"""Strategy files with random edits: read, compiled and checked, or refused with file and line.

This is the way of a user's file through `planner=file`. An edit may leave a file that is right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from time import process_time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_requests import request
from test_manual import preset

from sbp_core.compile import compile_plan
from sbp_core.errors import ConfigError
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy
from sbp_core.strategy_yaml import to_yaml
from sbp_core.testing.edits import edited, edited_text
from sbp_planner.configs import FileConfig
from sbp_planner.file import FilePlanner

LAYOUTS = {
    "zero": ((2,), ("data",)),
    "data_tensor": ((2, 2), ("data", "tensor")),
    "pipeline": ((2, 2), ("pipe", "data")),
}

#: Seconds of the processor that no file of this size may take.
MOST_S = 20.0


@cache
def planned(layout: str) -> tuple[PlanRequest, Strategy]:
    asked = request(*LAYOUTS[layout])
    return asked, preset(layout).plan(asked)


def as_json(strategy: Strategy, random: Random, num_edits: int) -> tuple[str, str]:
    value = json.loads(json.dumps(strategy.to_json()))
    for _ in range(num_edits):
        value = edited(value, random)
    return "strategy.json", json.dumps(value)


def as_yaml(strategy: Strategy, random: Random, num_edits: int) -> tuple[str, str]:
    value = yaml.safe_load(to_yaml(strategy))
    for _ in range(num_edits):
        value = edited(value, random)
    return "strategy.yaml", yaml.safe_dump(value, sort_keys=False)


def as_text(strategy: Strategy, random: Random, num_edits: int) -> tuple[str, str]:
    text = to_yaml(strategy)
    for _ in range(num_edits):
        text = edited_text(text, random)
    return "strategy.yaml", text


FORMATS: dict[str, Callable[[Strategy, Random, int], tuple[str, str]]] = {
    "json": as_json,
    "yaml": as_yaml,
    "text": as_text,
}


def take(layout: str, form: str, random: Random, folder: Path) -> str:
    """Edit a file and take it the way that a user's file goes; return what came of it."""
    asked, strategy = planned(layout)
    name, text = FORMATS[form](strategy, random, random.choice([1, 1, 1, 2, 3]))
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    begin = process_time()
    try:
        found = FilePlanner(FileConfig(path=str(path), allow_other_graph=True)).plan(asked)
        check(compile_plan(asked.graph, found))
    except ConfigError as error:
        assert error.what
        str(error).encode()  # it can be printed
        # JSON and YAML are deep without end, or have integers without end, where no line is known.
        place = error.where[0].removeprefix(f"planner.path={path}")
        assert re.fullmatch(r", line \d+(, column \d+)?", place) or _has_no_lines(text, error.what)
        return type(error).__name__
    finally:
        assert process_time() - begin < MOST_S, text[:2000]
    return "accepted"


def _has_no_lines(text: str, what: str) -> bool:
    """Whether a refusal is about a file as a whole."""
    return not text.strip() or "recursion" in what or "Exceeds the limit" in what


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(random=st.randoms(use_true_random=False))
def test_an_edited_file_is_planned_by_or_refused(
    tmp_path: Path, layout: str, form: str, random: Random
) -> None:
    take(layout, form, random, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_edited_files_are_planned_by_or_refused(
    tmp_path: Path, layout: str, form: str
) -> None:
    outcomes = {take(layout, form, Random(seed), tmp_path) for seed in range(1600)}

    assert {"accepted", "ConfigError"} <= outcomes
