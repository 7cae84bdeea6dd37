from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from traces import TracingRuntime, start_traced
from trainable import plan_step, registry, run_config, run_of

from sbp_core.errors import ConfigError, RunError
from sbp_launch.run.folder import RUN_FILES
from sbp_launch.run.stopping import StopSignals
from sbp_launch.team import Team
from sbp_launch.tracing.tracer import StepTracer
from sbp_launch.trainer import loop, trainer
from sbp_launch.trainer import session as session_module
from sbp_launch.trainer.run_program import make_program
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import scalar_values
from sbp_torch.runtime.configs import ReferenceConfig


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs have a runtime that traces."""
    make = session_module.Run.make

    def traced(run: session_module.Run, kind: str) -> object:
        return TracingRuntime(ReferenceConfig()) if kind == "runtime" else make(run, kind)

    monkeypatch.setattr(session_module.Run, "make", traced)


def run_steps(folder: Path, steps: range, *, fails_at: int = 0) -> StepTracer:
    """Run three steps of a small run, some of them traced; one may fail."""
    run = run_of(run_config())
    program = make_program(run)
    made = plan_step(run, program)
    scalars = scalar_values(program.model, program.optimizer, run.config.trainer.update)
    backend = LocalBackend()
    backend.open([0, 1])
    states = program.made.states(program.optimizer)
    with StepTracer(made, backend, steps, folder) as tracer:
        session = start_traced(made.plan, states)
        for number in (1, 2, 3):
            with tracer.step(number, session):
                session.step(program.example(4), {**scalars, "seed": 0, "step": number})
                if number == fails_at:
                    raise ArithmeticError("the step fails")
            tracer.finish(number)
            assert session.trace is None
    return tracer


def traced_steps(folder: Path) -> list[int]:
    value = json.loads((folder / "trace.json").read_text("utf-8"))
    return value["otherData"]["steps"]


def test_the_steps_that_are_asked_for_are_traced(tmp_path: Path) -> None:
    tracer = run_steps(tmp_path, range(2, 4))

    assert traced_steps(tmp_path) == [2, 3]
    assert tracer.lines[0] == "where the time of a step went (mean of steps 2-3)"
    assert "trace.json" in tracer.lines[-1]


def test_no_step_is_traced_unless_asked_for(tmp_path: Path) -> None:
    tracer = run_steps(tmp_path, range(0))

    assert not tracer.lines
    assert not list(tmp_path.iterdir())


def test_of_a_run_that_fails_the_steps_so_far_are_written(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="the step fails"):
        run_steps(tmp_path, range(1, 4), fails_at=2)

    assert traced_steps(tmp_path) == [1, 2]


def test_ranks_stop_together_where_the_trace_cannot_be_written(
    tmp_path: Path, tracing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.json").mkdir()
    told, stop_together = [], loop.stop_together

    def stop(
        team: Team,
        signals: StopSignals,
        problem: Exception | None,
        limit_s: float,
        asked: Sequence[int],
    ) -> list[int]:
        told.append(problem)
        return stop_together(team, signals, problem, limit_s, asked)

    monkeypatch.setattr(loop, "stop_together", stop)

    with pytest.raises(RunError, match="cannot be written") as caught:
        trainer.train(run_config(trace="2"), registry(), tmp_path)

    assert told == [None, caught.value]


def test_a_runtime_that_does_not_trace_is_refused_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime=reference does not trace") as caught:
        trainer.train(run_config(trace="1..2"), registry(), tmp_path)

    assert "runtime=actor" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_run_says_where_the_traced_steps_went(
    tmp_path: Path, tracing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(run_config(trace="2..3"), registry(), tmp_path)

    out = capsys.readouterr().out
    assert "where the time of a step went (mean of steps 2-3)" in out
    assert "trace of these steps: trace.json" in out
    assert traced_steps(tmp_path) == [2, 3]
    assert "trace.json" in RUN_FILES  # another run does not overwrite it


@pytest.mark.parametrize(
    ("trace", "steps"),
    [(None, []), ("2", [2]), (3, [3]), ("1..3", [1, 2, 3]), ("2..2", [2])],
)
def test_steps_to_trace_are_one_or_a_range(trace: str | int | None, steps: list[int]) -> None:
    assert list(run_config(trace=trace).trainer.traced_steps) == steps


@pytest.mark.parametrize("trace", ["", "0", "0..2", "3..2", "2..4", "4", "2-3", "all", "1..", -1])
def test_what_names_no_steps_of_the_run_is_refused(trace: str | int) -> None:
    with pytest.raises(ConfigError, match="names no steps of this run") as caught:
        replace(run_config().trainer, trace=trace)

    assert "1 to steps=3" in str(caught.value)
