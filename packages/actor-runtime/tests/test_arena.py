"""Segments that write into an arena: the same bits, the memory that was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from actor_plans import training_step
from torch import Tensor

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.session import ActorSession, build
from sbp_core.boxing.backend import BoxingBackend
from sbp_core.boxing.local import LocalBackend
from sbp_core.memory import predict
from sbp_core.memory.meter import Meter
from sbp_core.runtime.contract import Runtime
from sbp_core.testing.cases import CASES, compile_case, run_steps
from sbp_core.testing.runtime import RuntimeConformance

#: One thread a rank and one stage: what is alive does not depend on which thread comes first.
_FIXED = ("one rank", "data parallel", "tensor parallel", "sharded states", "accumulation")


class TestConformanceWithArena(RuntimeConformance):
    """All that every runtime must do, bit for bit as the reference."""

    def make_runtime(self) -> Runtime:
        return build(ActorConfig(arena=True))


@contextmanager
def _metered(name: str, *, arena: bool) -> Iterator[tuple[ActorSession, Meter]]:
    """Start a case with a meter."""
    plan = compile_case(name)
    meter = Meter(plan)
    backend: BoxingBackend = meter.backend(LocalBackend())
    runtime = build(ActorConfig(arena=arena))
    with runtime.start(plan, training_step(name).states, backend) as session:
        assert isinstance(session, ActorSession)
        with meter.watching(session):
            yield session, meter


@pytest.mark.parametrize("name", _FIXED)
def test_the_peak_without_an_arena_is_as_predicted(name: str) -> None:
    step = training_step(name)

    with _metered(name, arena=False) as (session, meter):
        for batch in step.batches[:2]:
            meter.restart()
            session.step(batch, step.scalars)

    found = {rank: meter.peak(rank) for rank in session.store.values}
    assert found == {r: memory.peak for r, memory in predict(compile_case(name)).ranks.items()}


@pytest.mark.parametrize("name", _FIXED)
def test_the_peak_beside_the_arena_is_as_predicted(name: str) -> None:
    step = training_step(name)
    wanted = predict(compile_case(name), arena=True)

    with _metered(name, arena=True) as (session, meter):
        for batch in step.batches[:2]:
            meter.restart()
            session.step(batch, step.scalars)

    for rank, memory in wanted.ranks.items():
        arena = memory.kinds["arena"]
        assert arena > 0
        assert arena == session.arena_bytes[rank]
        assert meter.peak(rank) == memory.peak


@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_pipeline_is_near_the_prediction(name: str) -> None:
    step = training_step(name)

    with _metered(name, arena=False) as (session, meter):
        for batch in step.batches[:2]:
            meter.restart()
            session.step(batch, step.scalars)

    # What waits for a receiver depends on who comes first; in so small a step it is much of it all.
    for rank, memory in predict(compile_case(name)).ranks.items():
        assert 0.85 < meter.peak(rank) / memory.peak < 1.15


def test_results_do_not_lie_in_the_arena() -> None:
    step = training_step("data parallel")

    with _metered("data parallel", arena=True) as (session, _):
        losses = [session.step(batch, step.scalars).loss for batch in step.batches]
        kept = [loss.clone() for loss in losses]
        states = {name: value.clone() for name, value in session.store.values[0].items()
                  if isinstance(value, Tensor)}  # fmt: skip
        old = dict(session.store.values[0])
        run_steps(session, step)

    assert all(map(torch.equal, losses, kept))
    assert all(torch.equal(old[name], value) for name, value in states.items())
