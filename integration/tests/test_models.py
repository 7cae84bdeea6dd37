"""A quick part of the matrix of real models: every layout, with models of our own zoo.

All of it, with other people's models: `nox -s exhaustive -- models`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layouts import LAYOUTS
from models.programs import PROGRAMS
from models.trial import TOLERANCES, Outcome, attempt

QUICK = [
    ("dlrm of bags", "data", "float64"),
    ("dlrm", "2-D", "float64"),
    ("dlrm", "tensor", "float32"),
    ("moe", "zero3", "float64"),
    ("moe", "recompute", "float64"),
    ("moe", "pipeline", "bfloat16"),
    ("resnet18", "zero1", "float64"),
    ("resnet18", "zero2", "float32"),
    ("resnet18", "pipeline", "float64"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "layout", "dtype"), QUICK)
def test_a_model_under_a_layout_is_the_one_device_program(
    program: str, layout: str, dtype: str
) -> None:
    outcome = attempt(program, layout, dtype, 3)

    assert not outcome.error, outcome.error
    assert outcome.loss_error <= TOLERANCES[dtype][0]
    if dtype == "float64":
        assert outcome.state_error <= 1e-9
    assert outcome.predicted_bytes == outcome.counted_bytes
    assert outcome.memory_error <= 0.1
    assert outcome.passed


def test_every_layout_is_in_the_quick_part() -> None:
    assert {layout for _, layout, _ in QUICK} == set(LAYOUTS)


@pytest.mark.slow
def test_a_deviation_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["dlrm"]
    build, calls = program.build, []

    def other_each_time() -> nn.Module:
        model = build()
        calls.append(model)
        with torch.no_grad():
            next(model.parameters()).add_(1e-6 * len(calls))
        return model

    monkeypatch.setitem(vars(PROGRAMS["dlrm"]), "build", other_each_time)
    outcome = attempt("dlrm", "data", "float64", 2)

    assert not outcome.error
    assert not outcome.passed


def test_what_is_raised_is_the_outcome_of_its_cell() -> None:
    outcome = Outcome(program="x", layout="data", dtype="float64", error="PlanError: no")

    assert not outcome.passed
    assert attempt("dlrn", "data", "float64", 1).error.startswith("KeyError")
