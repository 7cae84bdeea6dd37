"""What sessions of the actor runtime hold: the memory that was predicted, and nothing reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from actor_plans import training_step
from torch import Tensor

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_actor_runtime.session import ActorSession
from sbp_core.boxing.backend import BoxingBackend
from sbp_core.memory import predict_memory
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.testing.cases import CASES, compile_case, run_steps

#: One thread a rank and one stage: what is alive does not depend on which thread comes first.
_FIXED = ("one rank", "data parallel", "tensor parallel", "sharded states", "accumulation")


@contextmanager
def _metered(name: str) -> Iterator[tuple[ActorSession, MemoryMeter]]:
    """Start a case with a meter."""
    plan = compile_case(name)
    meter = MemoryMeter(plan)
    backend: BoxingBackend = meter.backend(LocalBackend())
    runtime = ActorRuntime(ActorConfig())
    with runtime.start(plan, training_step(name).states, backend) as session:
        assert isinstance(session, ActorSession)
        with meter.watching(session):
            yield session, meter


@pytest.mark.parametrize("name", _FIXED)
def test_the_peak_is_as_predicted(name: str) -> None:
    step = training_step(name)

    with _metered(name) as (session, meter):
        for batch in step.batches[:2]:
            meter.restart()
            session.step(batch, step.scalars)

    found = {rank: meter.peak(rank) for rank in session.store.values}
    assert found == {
        r: memory.peak for r, memory in predict_memory(compile_case(name)).ranks.items()
    }


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_pipeline_is_near_the_prediction(name: str) -> None:
    step = training_step(name)

    with _metered(name) as (session, meter):
        for batch in step.batches[:2]:
            meter.restart()
            session.step(batch, step.scalars)

    # What waits for a receiver depends on who comes first; in so small a step it is much of it all.
    for rank, memory in predict_memory(compile_case(name)).ranks.items():
        assert 0.85 < meter.peak(rank) / memory.peak < 1.15


def test_later_steps_do_not_write_over_results_and_states_keep_their_memory() -> None:
    step = training_step("data parallel")

    with _metered("data parallel") as (session, _):
        losses = [session.step(batch, step.scalars).loss for batch in step.batches]
        kept = [loss.clone() for loss in losses]
        held = session.store.values[0]
        before = {n: v.data_ptr() for n, v in held.items() if isinstance(v, Tensor)}
        run_steps(session, step)
        held = session.store.values[0]
        after = {n: v.data_ptr() for n, v in held.items() if isinstance(v, Tensor)}

    assert all(map(torch.equal, losses, kept))
    assert after == before


def test_a_meter_watches_the_ranks_of_its_process_alone() -> None:
    name, here = "data parallel", [1]
    plan = compile_case(name)
    meter = MemoryMeter(plan, here)
    runtime = ActorRuntime(ActorConfig())

    with runtime.start(plan, training_step(name).states, LocalBackend(), here) as session:
        assert isinstance(session, ActorSession)
        with meter.watching(session):
            held = [v.nbytes for v in session.store.values[1].values() if isinstance(v, Tensor)]
            assert meter.alive(1) == sum(held) > 0

    with pytest.raises(KeyError):
        meter.alive(0)
