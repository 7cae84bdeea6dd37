"""Tests of reading and sharing states, a part of the conformance suite of runtimes.

`testing.runtime` has the suite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sbp_core.boxing import volume
from sbp_core.errors import RunError, SbpLookupError, SbpValueError
from sbp_core.runtime import Number, Session, lost_states
from sbp_torch.testing.cases import (
    CASES,
    RuntimeSuitePart,
    assert_pieces,
    compile_case,
    compile_forward,
    forward_loss,
    reference_run,
    run_steps,
)
from sbp_torch.testing.programs import assert_equal, assert_near, raises

__all__ = ["StateCases"]


class StateCases(RuntimeSuitePart):
    """Tests of states: reading shards, gathering whole states, sharing between sessions."""

    def test_states_are_handed_back_as_they_were_given(self) -> None:
        """Before any step, `state_dict` has the names and values that `start` got."""
        step = CASES["data and tensor parallel"].step
        with self.start("data and tensor parallel") as session:
            found = session.state_dict()

        assert set(found) == set(step.states)
        for name, value in step.states.items():
            assert_equal(name, found[name], value)

    def test_pieces_are_every_element_of_every_state_once(self) -> None:
        """Together they are equal to `state_dict`; they are no copies."""
        for name in ("sharded states", "data and tensor parallel", "pipeline, 1F1B"):
            with self.start(name) as session:
                run_steps(session, CASES[name].step)
                pieces, wanted = list(session.pieces()), session.state_dict()
                for piece in pieces:
                    shards = [
                        self._shard(session, piece.name, rank) for rank in session.local_ranks
                    ]
                    assert any(piece.value is shard for shard in shards), f"{piece.name}: a copy"
            assert_pieces(pieces, wanted)

    def test_pieces_can_be_dealt_out_among_ranks_that_are_left(self) -> None:
        """Each element that the ranks hold comes once; elements of lost ranks are missing."""
        for name in ("data parallel", "sharded states", "data and tensor parallel"):
            left = [part.rank for part in compile_case(name).ranks][1:]
            lost = lost_states(compile_case(name), left)
            with self.start(name) as session:
                run_steps(session, CASES[name].step)
                wanted = session.state_dict()
                pieces = list(session.pieces(among=left))
            whole = {state: value for state, value in wanted.items() if state not in lost}
            assert_pieces((piece for piece in pieces if piece.name in whole), whole)
            for state in lost:
                found = sum(volume(piece.bounds) for piece in pieces if piece.name == state)
                assert found < wanted[state].numel(), f"what is lost of {state} is handed out"

    def _shard(self, session: Session, name: str, rank: int) -> Tensor | Number | None:
        try:
            return session.shard(name, rank)
        except SbpLookupError:
            return None  # the state is on another stage

    def test_a_state_is_gathered_whole(self) -> None:
        """For all ranks or one; it is a copy, equal to the state in `state_dict`."""
        for name in ("sharded states", "data and tensor parallel", "pipeline, 1F1B"):
            last = compile_case(name).ranks[-1].rank
            with self.start(name) as session:
                run_steps(session, CASES[name].step)
                wanted = session.state_dict()
                for state, value in session.state_dict(to=last).items():
                    assert_equal(state, value, wanted[state])
                for state, value in wanted.items():
                    for to in (None, last):
                        whole = session.gather(state, to=to)
                        assert whole is not None
                        assert_equal(state, whole, value)
                        whole.zero_()
                for state, value in session.state_dict().items():
                    assert_equal(state, value, wanted[state])
                with raises(SbpLookupError, match="no state is called 'nobody'"):
                    session.gather("nobody")
                with raises(SbpLookupError, match="there is no rank 99"):
                    session.state_dict(to=99)

    def test_saved_states_are_copies(self) -> None:
        """Later steps do not change the result of `state_dict`, nor depend on it."""
        step = CASES["data parallel"].step
        with self.start("data parallel") as session:
            saved = session.state_dict()
            kept = {name: value.clone() for name, value in saved.items()}
            session.step(step.batches[0], step.scalars)
            unchanged = all(torch.equal(saved[name], value) for name, value in kept.items())
            for value in session.state_dict().values():
                value.zero_()
            losses = [session.step(batch, step.scalars).loss for batch in step.batches[1:]]

        assert unchanged, "a step changed states that were handed out"
        for loss, wanted in zip(losses, reference_run("data parallel")[0][1:], strict=True):
            assert_equal("a later loss", loss, wanted)

    def test_a_session_shares_the_states_of_another_as_they_are(self) -> None:
        """A forward step on the states in training: without a copy, with their present values."""
        for name in ("sharded states", "data and tensor parallel"):
            step, forward = CASES[name].step, compile_forward(name, batch_size=3)
            batch = {key: value[:3] for key, value in step.batches[0].items()}
            with self.start(name) as training:
                with self.make_runtime().start(forward, training) as evaluation:
                    for _ in range(2):
                        states = training.state_dict()
                        shard = evaluation.shard("up.weight", 0)
                        assert shard is training.shard("up.weight", 0), "a copy"
                        found = evaluation.step(batch, step.scalars).loss
                        wanted = forward_loss(states, batch)
                        assert_near(f"{name}: the loss of a forward", found, wanted, 1e-9)
                        training.step(step.batches[0], step.scalars)
                    assert set(evaluation.state_dict()) < set(states)
                    with raises(RunError, match="belong to another session"):
                        evaluation.load_state_dict(states)
                training.step(step.batches[1], step.scalars)  # the backend is still open

    def test_states_that_are_stored_otherwise_are_not_shared(self) -> None:
        """SbpValueError names the state and its two layouts; training continues."""
        name = "sharded states"
        other = compile_forward(name, batch_size=3, stored_as="B")
        forward = compile_forward(name, batch_size=3)
        with self.start(name) as training:
            said = "stored as (B) on ranks [0, 1, 2, 3], and in the session"
            with raises(SbpValueError, match=said):
                self.make_runtime().start(other, training)
            with (
                self.make_runtime().start(forward, training) as evaluation,
                raises(SbpValueError, match="the session has no state"),
            ):
                self.make_runtime().start(compile_case(name), evaluation)
            run_steps(training, CASES[name].step)

    def test_a_shard_that_is_not_there_is_refused(self) -> None:
        """SbpLookupError for an unknown state, an unknown rank, and a state of another stage."""
        with self.start("pipeline, 1F1B") as session:
            parts = compile_case("pipeline, 1F1B").ranks
            first, last = parts[0], parts[-1]
            states = {slot.name for slot in last.slots} & session.state_dict().keys()
            other = min(states - {slot.name for slot in first.slots})
            with raises(SbpLookupError, match="did you mean"):
                session.shard(other + "s", last.rank)
            with raises(SbpLookupError, match="there is no rank 99"):
                session.shard(other, 99)
            with raises(SbpLookupError, match="another stage"):
                session.shard(other, first.rank)
