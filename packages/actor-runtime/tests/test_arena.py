"""Segments that write into an arena: the same bits, the memory that was predicted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import torch
from actor_plans import training_step
from torch import Tensor

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.session import ActorSession, build
from sbp_core.boxing.backend import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.compile.codec import decode, encode
from sbp_core.memory import arena as module
from sbp_core.memory.arena import lay_out
from sbp_core.runtime.contract import Runtime
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.memory import predict
from sbp_torch.memory.meter import Meter
from sbp_torch.testing.cases import CASES, compile_case, run_steps, shards_of
from sbp_torch.testing.runtime import RuntimeConformance

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


def _trained(
    plan: PhysicalPlan, name: str, *, arena: bool | Literal["auto"]
) -> tuple[dict[int, int], list[Tensor], dict[tuple[str, int], Tensor | float]]:
    """Run a case; return the bytes of its arenas, its losses, and the states of every rank."""
    step = training_step(name)
    runtime = build(ActorConfig(arena=arena))
    with runtime.start(plan, step.states, LocalBackend()) as session:
        losses = run_steps(session, step)
        return dict(session.arena_bytes), losses, shards_of(session, plan)


def _check_equal(found: tuple[object, ...], wanted: tuple[object, ...]) -> None:
    """Compare losses and states bit for bit."""
    torch.testing.assert_close(found[1:], wanted[1:], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_from_the_cache_brings_its_layout(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid = lay_out(compile_case(name), reads_at_once=True)
    plan = decode(encode(laid))
    monkeypatch.setattr(module, "lifetimes", None)  # would be called to lay out

    found = _trained(plan, name, arena=True)

    assert found[0] == {rank: slots.size_bytes for rank, slots in laid.arenas.items()}
    _check_equal(found, _trained(plan, name, arena=False))


def test_small_results_need_no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lifetimes", None)  # would be called to lay out

    arena_bytes, *_ = _trained(compile_case("accumulation"), "accumulation", arena="auto")

    assert not arena_bytes


def test_ranks_that_make_large_results_write_them_into_an_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "pipeline of data parallel stages"
    plan = lay_out(compile_case(name), reads_at_once=True)
    largest = {rank: slots.largest_bytes for rank, slots in plan.arenas.items()}
    assert len(set(largest.values())) > 1, "the test wants ranks that differ"
    monkeypatch.setattr(module, "FRESH_BYTES", max(largest.values()))

    found = _trained(plan, name, arena="auto")

    large = [rank for rank, size in largest.items() if size == max(largest.values())]
    assert found[0] == {rank: plan.arenas[rank].size_bytes for rank in large}
    _check_equal(found, _trained(plan, name, arena=False))


def test_segments_that_are_compiled_keep_their_own_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FRESH_BYTES", 1)
    step = training_step("one rank")
    config = ActorConfig(arena="auto", compile="inductor")

    with build(config).start(compile_case("one rank"), step.states, LocalBackend()) as session:
        assert not session.arena_bytes


def test_a_meter_watches_the_ranks_of_its_process_alone() -> None:
    name, here = "data parallel", [1]
    plan = compile_case(name)
    meter = Meter(plan, here)
    runtime = build(ActorConfig())

    with runtime.start(plan, training_step(name).states, LocalBackend(), here) as session:
        assert isinstance(session, ActorSession)
        with meter.watching(session):
            held = [v.nbytes for v in session.store.values[1].values() if isinstance(v, Tensor)]
            assert meter.alive(1) == sum(held) > 0

    with pytest.raises(KeyError):
        meter.alive(0)
