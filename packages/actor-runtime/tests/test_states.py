"""States whose ranks are in two processes: gathered through boxing, owned once, or refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from actor_plans import DATA, PIPELINE, SharedBackend, assert_states, run_step, start, training_step

from sbp_actor_runtime import session as session_module
from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_actor_runtime.session import ActorSession
from sbp_core.errors import RunError, SbpLookupError, SbpValueError
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.testing.cases import (
    assert_pieces,
    compile_case,
    compile_forward,
    forward_loss,
)

#: Every state of every layout: replicated, split, split twice, on one of two stages.
LAYOUTS = ("sharded states", "data and tensor parallel", DATA, PIPELINE)


def processes_of(name: str) -> list[ActorSession]:
    """Return the sessions of two processes, each with half of the ranks."""
    whole, ranks = LocalBackend(), list(compile_case(name).by_rank)
    half = len(ranks) // 2
    return [
        start(name, backend=SharedBackend(whole, here)) for here in (ranks[:half], ranks[half:])
    ]


def both(sessions: list[ActorSession], call: Callable[[ActorSession], Any]) -> list[Any]:
    """Call a function in both processes at the same time."""
    with ThreadPoolExecutor(2) as processes:
        return list(processes.map(call, sessions))


def outcome(session: ActorSession, call: Callable[[ActorSession], Any]) -> str:
    try:
        call(session)
    except RunError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_process_gathers_what_one_process_has(name: str) -> None:
    with start(name) as alone:
        loss = run_step(alone, name)
        wanted = alone.state_dict()
    sessions = processes_of(name)

    losses = both(sessions, lambda session: run_step(session, name))
    found = both(sessions, lambda session: session.state_dict())
    last = sessions[1].local_ranks[-1]
    to_last = both(sessions, lambda session: session.state_dict(to=last))
    state = next(iter(wanted))
    one = both(sessions, lambda session: session.gather(state, to=sessions[0].local_ranks[0]))

    assert all(torch.equal(value, loss) for value in losses)
    assert to_last[0] == {}
    assert one[1] is None
    assert torch.equal(one[0], wanted[state])
    for states in (*found, to_last[1]):
        assert list(states) == list(wanted)
        for key, value in wanted.items():
            assert torch.equal(states[key], value), key
    assert_pieces((piece for session in sessions for piece in session.pieces()), wanted)
    for session in sessions:
        session.close()


def test_what_is_gathered_is_a_copy() -> None:
    sessions = processes_of(DATA)
    states = both(sessions, lambda session: session.state_dict())

    for value in states[0].values():
        value.fill_(7)

    again = both(sessions, lambda session: session.state_dict())
    for name, value in training_step(DATA).states.items():
        assert torch.equal(again[0][name], value)
    for session in sessions:
        session.close()


def test_processes_that_gather_different_states_name_both() -> None:
    sessions = processes_of(DATA)
    names = dict(zip(sessions, ("up.weight", "down.weight"), strict=True))

    texts = both(sessions, lambda one: outcome(one, lambda session: session.gather(names[session])))

    for text in texts:
        assert "ranks 0, 1 have 'up.weight' for all ranks after step 0" in text
        assert "ranks 2, 3 have 'down.weight' for all ranks after step 0" in text
    for session in sessions:
        session.close()


def test_a_process_that_does_not_gather_is_named_at_the_deadline() -> None:
    first, second = processes_of(DATA)
    both([first, second], lambda session: run_step(session, DATA))
    first.together.deadline_s = 0.2

    with pytest.raises(
        RunError, match=r"'agreement on the states to gather' waited 0.2 s.*arrive: 2, 3"
    ):
        first.gather("up.weight")

    with pytest.raises(RunError, match="ended in a failed step"):
        run_step(first, DATA)
    for session in (first, second):
        session.close()


@pytest.mark.parametrize("how", ["closed", "failed"])
def test_after_the_end_a_process_has_its_own_pieces_only(how: str) -> None:
    sessions = processes_of("sharded states")
    wanted = training_step("sharded states").states

    for session in sessions:
        if how == "closed":
            session.close()
        else:
            session._abort(ValueError("bad"), RunError("rank 0 failed"))

    for session in sessions:
        with pytest.raises(RunError, match=r"(?s)cannot be asked for all states.*save the pieces"):
            session.state_dict()
    assert_pieces((piece for session in sessions for piece in session.pieces()), wanted)
    for session in sessions:
        session.close()


def test_new_values_of_shared_states_are_dropped() -> None:
    name, step = "data parallel", training_step("data parallel")
    plan = compile_case(name, in_place_states=False)
    with start(name, plan) as training:
        with ActorRuntime(ActorConfig()).start(plan, training) as other:
            losses = [other.step(step.batches[0], step.scalars).loss for _ in range(2)]
        assert (other.steps_done, training.steps_done) == (2, 0)
        assert_states(training, step.states)
        losses.append(run_step(training, name))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_sessions_train_the_same_states_in_turn(name: str, in_place: bool) -> None:
    step, plan = training_step(name), compile_case(name, in_place_states=in_place)
    with start(name, plan) as alone:
        for each in step.batches[:3]:
            alone.step(each, step.scalars)
        wanted = alone.state_dict()

    with (
        start(name, plan) as first,
        ActorRuntime(ActorConfig()).start(plan, first, keeps=True) as second,
    ):
        for session, each in zip((first, second, first), step.batches[:3], strict=True):
            session.step(each, step.scalars)
            assert_states(second, first.state_dict())
        assert_states(first, wanted)
        snapshot = second.snapshot()
        second.step(step.batches[0], step.scalars)
        assert_pieces(snapshot.pieces(), wanted)
        first.load_state_dict(step.states)
        assert_states(second, step.states)


def test_a_plan_that_overwrites_what_the_other_keeps_is_refused() -> None:
    kept = compile_case("data parallel", in_place_states=False)
    with (
        start("data parallel", kept) as training,
        pytest.raises(SbpValueError, match=r"(?s)overwrites '.*overwrite the same states"),
    ):
        ActorRuntime(ActorConfig()).start(compile_case("data parallel"), training, keeps=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_some_states_are_replaced_and_the_others_stay(name: str) -> None:
    with start(name) as session:
        run_step(session, name)
        before = session.state_dict()
        snapshot = session.snapshot()
        chosen = {one: before[one] + 1 for one in list(before)[::2] if before[one].dim()}

        session.replace(chosen)

        assert_states(session, {**before, **chosen})
        assert_pieces(snapshot.pieces(), before)
        with pytest.raises(SbpValueError, match="shape"):
            session.replace({**chosen, next(iter(chosen)): torch.ones(7, 7)})
        with pytest.raises(SbpLookupError, match="no state is called 'nothing'"):
            session.replace({"nothing": torch.ones(2)})
        assert_states(session, {**before, **chosen})
        run_step(session, name)


def test_states_that_training_overwrites_are_shared_as_they_are() -> None:
    name, step = "data parallel", training_step("data parallel")
    batch = {key: value[:4] for key, value in step.batches[0].items()}
    with (
        start(name, compile_case(name)) as training,
        ActorRuntime(ActorConfig()).start(
            compile_forward(name, batch_size=4), training
        ) as evaluation,
    ):
        for each in step.batches[:2]:
            training.step(each, step.scalars)
            found = evaluation.step(batch, {}).loss
            torch.testing.assert_close(
                found, forward_loss(training.state_dict(), batch), rtol=0, atol=1e-9
            )


def test_a_plan_that_overwrites_shared_states_is_refused() -> None:
    with (
        start("data parallel", compile_case("data parallel", in_place_states=False)) as training,
        pytest.raises(SbpValueError, match=r"(?s)overwrites '.*in_place_states=False"),
    ):
        ActorRuntime(ActorConfig()).start(compile_case("data parallel"), training)


def test_without_a_session_there_must_be_a_backend() -> None:
    with pytest.raises(SbpValueError, match="there is no backend"):
        ActorRuntime(ActorConfig()).start(compile_case(DATA), training_step(DATA).states)


def test_torn_states_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = compile_case("data parallel", in_place_states=False)
    with (
        start("data parallel", plan) as training,
        ActorRuntime(ActorConfig()).start(plan, training) as other,
    ):
        monkeypatch.setattr(training, "_is_partially_updated", lambda: True)
        # Nothing has told its threads to end, for which it waits.
        monkeypatch.setattr(session_module, "GRACE_S", 0.1)

        with pytest.raises(RunError, match="belong to two steps"):
            other.step(training_step("data parallel").batches[0], {"lr": 0.1})


def test_an_unknown_state_or_rank_is_refused_before_anything_is_sent() -> None:
    sessions = processes_of(DATA)

    for session in sessions:
        with pytest.raises(SbpLookupError, match=r"did you mean 'up\.weight'"):
            session.gather("up.weigth")
        with pytest.raises(SbpLookupError, match="there is no rank 9"):
            session.gather("up.weight", to=9)
        with pytest.raises(SbpLookupError, match="there is no rank 9"):
            session.state_dict(to=9)

    both(sessions, lambda session: run_step(session, DATA))
    for session in sessions:
        session.close()
