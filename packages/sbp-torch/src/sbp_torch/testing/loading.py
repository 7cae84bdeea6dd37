"""Tests of loading states, a part of the conformance suite of runtimes (`testing.runtime`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import RunError, SbpValueError
from sbp_core.runtime import Session
from sbp_torch.testing.cases import (
    CASES,
    RuntimeSuitePart,
    compile_case,
    compile_forward,
    reference_run,
    run_steps,
    shards_of,
)
from sbp_torch.testing.programs import assert_equal, raises

__all__ = ["LoadingCases"]


class _InParts(dict[str, Tensor]):
    """States that can be read in parts, like a file; `when_read` is called with each name."""

    when_read: Callable[[str], None] = staticmethod(lambda name: None)

    def like(self, name: str) -> Tensor:
        """Return a state without its values."""
        return self[name].to("meta")

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part of a state."""
        self.when_read(name)
        return self[name][tuple(slice(*dim) for dim in bounds)].clone()


def _references(session: Session, plan: PhysicalPlan) -> dict[tuple[str, int], weakref.ref[Tensor]]:
    """Return a weak reference to each shard that is a tensor."""
    shards = ((key, session.shard(*key)) for key in shards_of(session, plan))
    return {key: weakref.ref(value) for key, value in shards if isinstance(value, Tensor)}


class LoadingCases(RuntimeSuitePart):
    """Cases of `load_state_dict`: replaced states, memory while loading, and failures."""

    def _begin(self, name: str) -> Session:
        """Start a case, and take its first step."""
        step = CASES[name].step
        session = self.start(name)
        session.step(step.batches[0], step.scalars)
        return session

    def test_a_run_goes_on_from_saved_states(self) -> None:
        """Two steps, and a third in a session that loads their states, equal three steps."""
        name = "sharded states"
        step = CASES[name].step
        with self._begin(name) as session:
            session.step(step.batches[1], step.scalars)
            saved = session.state_dict()
        for states in (saved, _InParts(saved)):
            with self._begin(name) as session:
                session.load_state_dict(states)
                loss = session.step(step.batches[2], step.scalars).loss
            assert_equal("the loss of step 2", loss, reference_run(name)[0][2])

    def test_what_is_loaded_is_read_when_what_it_replaces_is_let_go_of(self) -> None:
        """Old shards are freed before new ones are read, also if an evaluation shares them."""
        case = "sharded states"
        step, forward = CASES[case].step, compile_forward(case, batch_size=3)
        states = _InParts(step.states)
        read: list[str] = []
        with ExitStack() as stack:
            session = stack.enter_context(self._begin(case))
            evaluation = stack.enter_context(self.make_runtime().start(forward, session))
            batch = {key: value[:3] for key, value in step.batches[0].items()}
            evaluation.step(batch, step.scalars)
            old = _references(session, compile_case(case))

            def check(state: str) -> None:
                read.append(state)
                held = [key for key, value in old.items() if key[0] in read and value() is not None]
                assert not held, f"{held} are held when {state} is read"

            states.when_read = check
            session.load_state_dict(states)
            losses = run_steps(session, step)

        assert {state for state, _ in old} <= set(read), "not all were read in parts"
        for loss, wanted in zip(losses, reference_run(case)[0], strict=True):
            assert_equal("a loss after loading", loss, wanted)

    def test_states_that_do_not_fit_are_refused_and_do_no_harm(self) -> None:
        """SbpValueError from `start` and `load_state_dict`; the session continues unchanged."""
        name = "data parallel"
        step = CASES[name].step
        missing = dict(step.states)
        del missing["up.weight"]
        with raises(SbpValueError, match="up.weight"):
            self.make_runtime().start(compile_case(name), missing, self.make_backend())
        other = {key: torch.zeros_like(value) for key, value in step.states.items()}
        last = list(other)[-1]
        bad = (
            ({**other, "nobody": torch.zeros(1)}, "nobody"),
            ({**other, "up.weight": torch.zeros(1)}, "up.weight"),
            ({**other, last: torch.zeros(2, 3, 5, 7)}, last),
        )
        with self._begin(name) as session:
            for states, told in bad:
                for given in (states, _InParts(states)):
                    with raises(SbpValueError, match=told):
                        session.load_state_dict(given)
            loss = session.step(step.batches[1], step.scalars).loss
        assert_equal("the loss of step 1", loss, reference_run(name)[0][1])

    def test_states_that_were_replaced_in_part_are_not_handed_out(self) -> None:
        """The mapping's error is raised; then RunError, until other states are loaded."""
        name = "sharded states"
        step = CASES[name].step
        states, read = _InParts(step.states), list[str]()

        def fail_late(state: str) -> None:
            read.append(state)
            if len(set(read)) == 3:
                raise OSError("the disk is gone")

        states.when_read = fail_late
        with self._begin(name) as session:
            before = session.snapshot(), session.state_dict()
            with raises(OSError, match="the disk is gone"):
                session.load_state_dict(states)
            refused: tuple[Callable[[], object], ...] = (
                lambda: session.step(step.batches[0], step.scalars),
                lambda: session.shard("up.weight", session.local_ranks[0]),
                session.state_dict,
                session.pieces,
                session.snapshot,
                lambda: session.gather("up.weight"),
            )
            for call in refused:
                with raises(RunError, match="there are no states") as told:
                    call()
                assert "the disk is gone" in str(told[0]), "it does not say why"
            for piece in before[0].pieces():
                part = tuple(slice(*dim) for dim in piece.bounds)
                assert_equal(
                    f"{piece.name} of a snapshot", piece.value, before[1][piece.name][part]
                )
            session.load_state_dict(dict(step.states))
            losses = run_steps(session, step)
        for loss, wanted in zip(losses, reference_run(name)[0], strict=True):
            assert_equal("a loss after loading", loss, wanted)
