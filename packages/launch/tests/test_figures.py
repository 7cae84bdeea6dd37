"""What steps took beside what was predicted: which steps count, and what is said of too few."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
from trainable import planned, registry, run_config, run_of

from sbp_core.boxing.backend import BoxingBackend
from sbp_core.cluster import Cluster
from sbp_core.memory import predict_memory
from sbp_core.runtime import StepResult
from sbp_core.units import format_bytes
from sbp_launch.trainer import trainer
from sbp_launch.trainer.figures import Predicted, StepMeter, far_off, prediction_basis, time_text
from sbp_launch.trainer.run_program import make_program
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.graph_capture import scalar_values
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime, ReferenceSession

NOTHING = Predicted(step_s=None, peak_bytes=None, sent_bytes=None)


@pytest.mark.parametrize(
    ("step_s", "text"),
    [
        ([9.0, 0.1, 0.3], "a step took 200 ms (median of steps 2-3)"),
        ([9.0] * 4 + [0.3, 0.1, 0.2, 5.0], "a step took 250 ms (median of steps 5-8)"),
        ([9.0] * 10 + [0.1] * 290, "a step took 100 ms (median of steps 11-300)"),
    ],
)
def test_the_time_of_a_step_is_the_median_without_the_first_ones(
    step_s: list[float], text: str
) -> None:
    assert time_text(step_s) == text


@pytest.mark.parametrize("count", [1, 2])
def test_of_fewer_than_three_steps_no_time_is_told(count: int) -> None:
    assert time_text([1.0] * count) == f"too few steps to time one: {count} of at least 3"


@pytest.mark.slow(but=3)
@pytest.mark.parametrize(
    ("predicted_s", "says"),
    [
        (0.2, []),
        (0.11, []),
        (0.39, []),
        (0.1, ["  2.0 times slower than predicted: the prediction rests on a guess"]),
        (0.004, ["  50 times slower than predicted: the prediction rests on a guess"]),
        (0.8, ["  4.0 times faster than predicted: the prediction rests on a guess"]),
    ],
)
def test_a_prediction_that_is_off_by_a_factor_of_two_says_what_it_rests_on(
    predicted_s: float, says: list[str]
) -> None:
    step_s = [9.0, 9.0, 0.2, 0.2]
    step_meter = StepMeter(planned().plan, LocalBackend(), counts_memory=False)
    step_meter.step_s += step_s

    assert far_off(step_s, predicted_s, "a guess") == says
    assert far_off([9.0, 9.0], predicted_s, "a guess") == []
    predicted = replace(NOTHING, step_s=predicted_s, basis="a guess")
    assert step_meter.lines(predicted)[1:] == says


def test_a_prediction_rests_on_declared_rates_or_on_a_file_and_its_backend() -> None:
    cluster = Cluster.nominal(4)

    declared = prediction_basis(cluster, "local")
    other = prediction_basis(replace(cluster, backend="torch"), "measured", "a.json")
    same = prediction_basis(replace(cluster, backend="local"), "measured", "a.json")

    run = run_of(run_config())
    assert trainer.predicted_of(run, make_program(run), planned()).basis == prediction_basis(
        Cluster.nominal(prod(run.config.mesh)), "local", boxing=run.config.boxing.name
    )
    assert "cluster=local declares" in declared
    assert "`sbp-calibrate boxing=local ranks=4`" in declared
    assert "boxing=torch, not boxing=local" in other
    assert "`sbp-calibrate boxing=local ranks=4 out=a.json` adds that" in other
    assert "`sbp-calibrate boxing=local ranks=4 out=a.json` measures again" in same


@pytest.mark.parametrize("counts_memory", [True, False])
def test_memory_is_counted_in_the_first_step_alone_if_at_all(
    counts_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, found = make_program(run_of(run_config())), planned()
    states = program.made.states(program.optimizer)
    scalars = {**scalar_values(program.model, program.optimizer), "seed": 0}
    step_meter = StepMeter(found.plan, LocalBackend(), counts_memory=counts_memory)
    runtime = ReferenceRuntime(ReferenceConfig())
    step, watched = ReferenceSession.step, []

    def noted(self, batch, scalars, **named):
        watched.append("watch" in vars(self))
        return step(self, batch, scalars, **named)

    monkeypatch.setattr(ReferenceSession, "step", noted)

    with runtime.start(found.plan, states, step_meter.backend) as session:
        for index in range(3):
            batch, now = program.example(4), {**scalars, "step": index}
            step_meter.take(session, partial(session.step, batch, now))

    peak = max(rank.peak for rank in predict_memory(found.plan).ranks.values())
    held = [f"a rank held at most {format_bytes(peak)} (in step 1)"] if counts_memory else []
    assert watched == [counts_memory, False, False]
    assert step_meter.lines(NOTHING)[1:] == held


class Sending:
    """A session in whose step n the first rank sends 1000 n bytes."""

    def __init__(self, backend: BoxingBackend) -> None:
        self.backend, self.steps = backend, 0

    def step(self, batch: object, scalars: object, *, batch_is: str) -> StepResult:
        self.steps += 1
        self.backend.communicator(0).sent_bytes += 1000 * self.steps
        return StepResult(outputs={"loss": torch.tensor(1.0)})


def test_the_bytes_of_a_step_are_the_mean_of_what_boxing_has_counted_meanwhile() -> None:
    backend = LocalBackend()
    backend.open([0, 1])
    backend.communicator(1).sent_bytes = 77
    step_meter = StepMeter(planned().plan, backend, counts_memory=False)
    session = Sending(backend)

    for _ in range(3):
        step_meter.take(session, partial(session.step, {}, {}, batch_is="local"))  # type: ignore[arg-type]

    line = step_meter.lines(replace(NOTHING, sent_bytes=1900))[1]
    assert line == "the ranks sent 2000 B in a step; predicted 1900 B"


def test_what_was_predicted_stands_behind_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(run_config(), registry(), tmp_path)

    out = capsys.readouterr().out
    assert re.search(r"a step took \S+ m?s \(median of steps 2-3\); predicted \S+ [mµ]?s\n", out)
    peak = re.search(r"a rank held at most (.*) \(in step 1\); predicted (.*)\n", out)
    assert peak is not None
    assert peak[1] == peak[2]
    # The reference runtime moves everything by itself.
    assert "the ranks sent" not in out
