"""Tests of snapshots of states, a part of the conformance suite of runtimes (`testing.runtime`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import RunError
from sbp_core.runtime import Session, Snapshot, StatePiece
from sbp_torch.testing.cases import (
    CASES,
    RuntimeSuitePart,
    assert_pieces,
    compile_case,
    compile_forward,
    reference_run,
    run_steps,
)
from sbp_torch.testing.failing_plans import (
    plan_failing_late,
    plan_with,
    refuse_large,
    too_large,
)
from sbp_torch.testing.programs import assert_equal, raises

__all__ = ["SnapshotCases"]


class SnapshotCases(RuntimeSuitePart):
    """Tests that later steps, failures and the end of the session do not change a snapshot."""

    def test_a_snapshot_keeps_what_later_steps_overwrite(self) -> None:
        """Snapshots before each step are correct at the end, and do not change the steps."""
        for name in (
            "sharded states",
            "pipeline with boxing threads",
            "large table",
            "running statistics",
        ):
            self._keep(name, compile_case(name))
        self._keep("sharded states", compile_case("sharded states", in_place_states=False))

    def _keep(self, name: str, plan: PhysicalPlan) -> None:
        taken: list[tuple[Snapshot, Mapping[str, Tensor]]] = []
        losses = []
        with self.start(name, plan=plan) as session:
            for batch in CASES[name].step.batches:
                taken += [(session.snapshot(), session.state_dict()) for _ in range(2)]
                losses.append(session.step(batch, CASES[name].step.scalars).loss.clone())
        for loss, wanted in zip(losses, reference_run(name)[0], strict=True):
            assert_equal(f"{name}: a loss", loss, wanted)
        for index, (snapshot, states) in enumerate(taken):
            assert snapshot.steps_done == index // 2, "it is not of that step"
            for _ in range(2):  # a snapshot can be read more than once
                assert_pieces(snapshot.pieces(), states)

    def test_a_snapshot_names_the_pieces_of_the_session(self) -> None:
        """Names, shapes, dtypes and bounds are those of `Session.pieces`, each once."""
        for name in ("sharded states", "pipeline, 1F1B"):
            with self.start(name) as session, session.snapshot() as snapshot:
                found, wanted = (
                    sorted((p.name, p.shape, p.dtype, p.bounds) for p in of.pieces())
                    for of in (snapshot, session)
                )
            assert found == wanted, f"{name}: other pieces"

    def test_a_snapshot_with_a_limit_is_read_while_steps_go_on(self) -> None:
        """Pieces have the values of its time, in the order of `slices`; there is no deadlock."""

        def read(snapshot: Snapshot) -> list[StatePiece]:
            with snapshot:
                return [
                    replace(piece, value=torch.as_tensor(piece.value).clone())
                    for piece in snapshot.pieces()
                ]

        for name in ("sharded states", "pipeline with boxing threads"):
            with self.start(name) as session, ThreadPoolExecutor(1) as reader:
                for batch, limit_bytes in zip(CASES[name].step.batches, (0, 300), strict=False):
                    states, snapshot = (
                        session.state_dict(),
                        session.snapshot(limit_bytes=limit_bytes),
                    )
                    slices = snapshot.slices()
                    reading = reader.submit(read, snapshot)
                    session.step(batch, CASES[name].step.scalars)
                    pieces = reading.result(60.0)
                    assert_pieces(pieces, states)
                    found = [(p.name, p.shape, p.dtype, p.bounds) for p in pieces]
                    assert found == [(s.name, s.shape, s.dtype, s.bounds) for s in slices]

    def test_a_released_snapshot_is_not_read(self) -> None:
        """RunError; the next snapshot has correct values, although it may reuse the memory."""
        name = "sharded states"
        with self.start(name) as session:
            for batch in CASES[name].step.batches:
                with session.snapshot() as snapshot:
                    states = session.state_dict()
                    session.step(batch, CASES[name].step.scalars)
                    assert_pieces(snapshot.pieces(), states)
                snapshot.release()
                with raises(RunError, match="released"):
                    list(snapshot.pieces())
            unread = session.snapshot()
            unread.release()
            session.step(batch, CASES[name].step.scalars)

    def test_a_snapshot_outlives_a_step_that_fails(self) -> None:
        """The step fails before the commit, or after it, which leaves states of two steps."""
        name = "data and tensor parallel"
        plan, _ = plan_with(compile_case(name), 3, refuse_large())
        step = CASES[name].step
        with self._taken(name, plan) as (session, _), raises(RunError):
            session.step(too_large(step.batches[1]), step.scalars)
        late = plan_failing_late(compile_case(name), 3, refuse_large())
        with self._taken(name, late) as (session, _), raises(RunError):
            session.step(step.batches[1], dict.fromkeys(step.scalars, 1e12))

    def test_a_snapshot_outlives_a_step_that_is_undone(self) -> None:
        """The loss is NaN; the session continues."""
        name = "data parallel"
        step, losses = CASES[name].step, reference_run(name)[0]
        bad = {
            key: value * torch.nan if value.is_floating_point() else value
            for key, value in step.batches[1].items()
        }
        with self._taken(name) as (session, _):
            session.only_finite = True
            with raises(RunError):
                session.step(bad, step.scalars)
            for batch, wanted in zip(step.batches[1:], losses[1:], strict=True):
                assert_equal("a later loss", session.step(batch, step.scalars).loss, wanted)

    def test_a_snapshot_keeps_what_loading_replaces(self) -> None:
        """It has the states from before `load_state_dict`, also after further steps."""
        name = "sharded states"
        with self._taken(name) as (session, states):
            session.load_state_dict({n: torch.zeros_like(v) for n, v in states.items()})
            run_steps(session, CASES[name].step)

    def test_a_snapshot_outlives_its_session(self) -> None:
        """One snapshot is taken before the end, one after it; no thread is left."""
        before = set(threading.enumerate())
        name = "sharded states"
        with self._taken(name) as (session, states):
            session.close()
            assert_pieces(session.snapshot().pieces(), states)
            assert set(threading.enumerate()) <= before, "threads are left"

    def test_a_snapshot_of_shared_states_keeps_what_their_session_overwrites(self) -> None:
        """A session for evaluation is saved while training continues."""
        name = "sharded states"
        step = CASES[name].step
        forward = compile_forward(name, batch_size=3)
        with (
            self.start(name) as training,
            self.make_runtime().start(forward, training) as evaluation,
        ):
            taken = []
            for batch in step.batches:
                taken.append((evaluation.snapshot(), evaluation.state_dict()))
                training.step(batch, step.scalars)
            for snapshot, states in taken:
                assert_pieces(snapshot.pieces(), states)

    @contextmanager
    def _taken(
        self, name: str, plan: PhysicalPlan | None = None
    ) -> Iterator[tuple[Session, dict[str, Tensor]]]:
        """Take a snapshot after the first step; after the session, compare it with its states."""
        with self.start(name, plan=plan) as session:
            session.step(CASES[name].step.batches[0], CASES[name].step.scalars)
            states, snapshot = session.state_dict(), session.snapshot()
            yield session, states
        assert_pieces(snapshot.pieces(), states)
