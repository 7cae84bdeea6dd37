"""Sessions whose ranks are processes: results and states everywhere, as in one process."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from processes import run_ranks
from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import discover
from sbp_core.runtime import batch_parts
from sbp_torch.testing.cases import (
    CASES,
    assert_pieces,
    compile_case,
    compile_forward,
    forward_loss,
    local_batch,
    reference_run,
)

#: Of two ranks: replicated and split states, a partial sum, several micro-batches, two stages.
NAMES = ("data parallel", "tensor parallel", "accumulation", "pipeline, 1F1B")


def train(name: str, rank: int, backend: BoxingBackend) -> dict[str, Any]:
    """Run all steps of a case on one rank; return what the session gives there."""
    step = CASES[name].step
    runtime = discover(strict=True).make("runtime", "actor", {"deadline_s": 30.0})
    with runtime.start(compile_case(name), step.states, backend) as session:
        assert session.local_ranks == (rank,)
        losses = [session.step(batch, step.scalars).loss for batch in step.batches]
        assert session.steps_done == len(losses)
        return {
            "losses": losses,
            "whole": session.state_dict(),
            "to 1": session.state_dict(to=1),
            "pieces": list(session.pieces()),
        }


def train_on_parts(name: str, rank: int, backend: BoxingBackend) -> list[torch.Tensor]:
    """Run all steps of a case on one rank, which is given only what it holds of a batch."""
    step, plan = CASES[name].step, compile_case(name)
    runtime = discover(strict=True).make("runtime", "actor", {"deadline_s": 30.0})
    parts = batch_parts(plan, [rank])
    with runtime.start(plan, step.states, backend) as session:
        return [
            session.step(local_batch(batch, parts), step.scalars, batch_is="local").loss
            for batch in step.batches
        ]


def train_and_evaluate(name: str, rank: int, backend: BoxingBackend) -> list[dict[str, Any]]:
    """Run the steps of a case, with an evaluation before each, on what is being trained."""
    step, forward = CASES[name].step, compile_forward(name, batch_size=4)
    batch = {key: value[:4] for key, value in step.batches[0].items()}
    runtime = discover(strict=True).make("runtime", "actor", {"deadline_s": 30.0})
    found = []
    with (
        runtime.start(compile_case(name), step.states, backend) as training,
        runtime.start(forward, training) as evaluation,
    ):
        for each in step.batches:
            states = training.state_dict(to=0)
            shared = evaluation.shard("up.weight", rank) is training.shard("up.weight", rank)
            loss = evaluation.step(batch, step.scalars).loss
            found.append({"states": states, "loss": loss, "shared": shared})
            training.step(each, step.scalars)
    return found


@pytest.mark.parametrize("name", ["data parallel", "tensor parallel"])
def test_an_evaluation_runs_on_the_states_of_the_moment_in_every_process(name: str) -> None:
    batch = {key: value[:4] for key, value in CASES[name].step.batches[0].items()}
    compile_forward(name, batch_size=4)

    first, second = run_ranks(2, partial(train_and_evaluate, name))

    for one, other in zip(first, second, strict=True):
        assert (one["shared"], other["shared"]) == (True, True)
        assert torch.equal(one["loss"], other["loss"])
        assert abs(one["loss"] - forward_loss(one["states"], batch)) < 1e-9
    assert first[0]["loss"] != first[1]["loss"]


def hold_messages(quota: int, rank: int, backend: BoxingBackend) -> int:
    """Run a step of a pipeline whose last stage is slow.

    Return how many messages a rank held of the one link through which it sends.
    """
    step, plan = CASES["pipeline, GPipe"].step, compile_case("pipeline, GPipe")
    plan = replace(plan, links=tuple(replace(link, quota=quota) for link in plan.links))
    sent: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def post(call: Any, receiver: int, values: Any, tag: int) -> Any:
        nonlocal most
        if "micro-batch" in call.tag:  # no text in which ranks compare what they run
            sent.append(weakref.ref(values))
            most = max(most, sum(values() is not None for values in sent))
        return posted(call, receiver, values, tag)

    def ask_late(*given: Any, **rest: Any) -> Any:
        time.sleep(0.1 if rank else 0.0)
        return asked(*given, **rest)

    runtime = discover(strict=True).make("runtime", "actor", {"deadline_s": 30.0})
    with (
        runtime.start(plan, step.states, backend) as session,
        pytest.MonkeyPatch.context() as patch,
    ):
        communicator: Any = backend.communicator(rank)
        posted, asked = communicator._connections.post, communicator.begin_receive
        patch.setattr(communicator._connections, "post", post)
        patch.setattr(communicator, "begin_receive", ask_late)
        session.step(step.batches[0], step.scalars)
    return most


@pytest.mark.parametrize("quota", [1, 2])
def test_a_sender_holds_no_more_messages_than_its_link_has_credits(quota: int) -> None:
    compile_case("pipeline, GPipe")

    sender, _ = run_ranks(2, partial(hold_messages, quota))

    assert sender == quota


@pytest.mark.parametrize("name", ["accumulation", "pipeline, 1F1B"])
def test_every_process_may_have_its_own_part_of_the_batch_alone(name: str) -> None:
    losses, _ = reference_run(name)

    for found in run_ranks(2, partial(train_on_parts, name)):
        assert all(map(torch.equal, found, losses))


@pytest.mark.parametrize("name", NAMES)
def test_every_process_has_losses_and_states_of_the_reference(name: str) -> None:
    losses, shards = reference_run(name)
    compile_case(name)  # once, for both

    found = run_ranks(2, partial(train, name))

    for rank in found:
        assert all(map(torch.equal, rank["losses"], losses))
        assert rank["whole"].keys() == CASES[name].step.states.keys()
        for state, value in rank["whole"].items():
            assert torch.equal(value, found[0]["whole"][state])
    assert found[0]["to 1"] == {}
    assert all(torch.equal(v, found[1]["whole"][k]) for k, v in found[1]["to 1"].items())
    assert_pieces((piece for rank in found for piece in rank["pieces"]), found[0]["whole"])
    for owner, rank in enumerate(found):
        for piece in rank["pieces"]:
            if isinstance(piece.value, torch.Tensor):
                assert torch.equal(piece.value, torch.as_tensor(shards[piece.name, owner]))
