"""The work of single actors, with a communicator that only writes down what it is asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from threading import Lock
from typing import Any, TypeVar

import pytest
import torch
from actor_plans import DATA, PIPELINE, training_step
from torch import Tensor

from sbp_actor_runtime import work as work_module
from sbp_actor_runtime.message import StepOrder, Values
from sbp_actor_runtime.work import SHORT_S, Receiving, in_turn, work_of
from sbp_core.boxing.backend import Communicator, Delivered, Delivery
from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import Accumulate, Actor, Collective, Compute, Receive, Send
from sbp_core.runtime import SpanKind, Trace
from sbp_torch.testing.cases import compile_case


class Recorder(Communicator):
    """Answers every call with its number."""

    def __init__(self, rank: int) -> None:
        self.rank, self.sent_bytes = rank, 0
        self.calls: list[tuple[str, str, float]] = []

    def _write(self, kind: str, tag: str, deadline_s: float) -> Tensor:
        self.calls.append((kind, tag, deadline_s))
        return torch.tensor(len(self.calls))

    def collective(
        self, step: BoxingStep, shard: Tensor, *, tag: str, deadline_s: float, donate: bool = False
    ) -> Tensor:
        return self._write("collective", tag, deadline_s)

    def send(self, step: BoxingStep, shard: Tensor, *, tag: str, deadline_s: float) -> Delivery:
        self._write("send", tag, deadline_s)
        return Delivered()

    def receive(
        self, step: BoxingStep, shard: Tensor | None, *, tag: str, deadline_s: float
    ) -> Tensor:
        return self._write("receive", tag, deadline_s)


class SlowReceivers(Recorder):
    """Receives a message when its sender waits for that, and no earlier."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.held: list[str] = []
        self.most_held = 0

    def send(self, step: BoxingStep, shard: Tensor, *, tag: str, deadline_s: float) -> Delivery:
        self.held.append(tag)
        self.most_held = max(self.most_held, len(self.held))
        return _Late(self, tag)


class _Late(Delivery):
    def __init__(self, receivers: SlowReceivers, tag: str) -> None:
        self.receivers, self.tag = receivers, tag

    def wait(self) -> None:
        self.receivers.held.remove(self.tag)


def order(index: int = 0) -> StepOrder:
    return StepOrder(index, {}, [], 7.0)


_Kind = TypeVar("_Kind", bound=Actor)


def actor_of(name: str, rank: int, kind: type[_Kind]) -> _Kind:
    return next(a for a in compile_case(name).by_rank[rank].actors if isinstance(a, kind))


def tags_of(kind: type[Send | Receive], rank: int, values: dict[str, Any]) -> list[str]:
    actor, recorder = actor_of(PIPELINE, rank, kind), Recorder(rank)
    work = work_of(actor, compile_case(PIPELINE), recorder, Lock())
    for step in (0, 1):
        for index in (0, 1, 2):
            work(index, values, order(step))
    return [tag for _, tag, _ in recorder.calls]


def test_every_firing_has_a_tag_of_its_own() -> None:
    tags = tags_of(Send, 0, {"x": torch.zeros(1)})

    assert len(set(tags)) == 6


def test_sender_and_receiver_call_a_firing_the_same() -> None:
    sent = tags_of(Send, 0, {"x": torch.zeros(1)})
    received = tags_of(Receive, 2, {})

    assert sent == received


@pytest.mark.parametrize("quota", [1, 2, 3])
def test_a_sender_holds_no_more_than_the_quota_of_its_link(quota: int) -> None:
    plan, actor = compile_case(PIPELINE), actor_of(PIPELINE, 0, Send)
    plan = replace(plan, links=tuple(replace(link, quota=quota) for link in plan.links))
    receivers = SlowReceivers(0)
    work = work_of(actor, plan, receivers, Lock())

    for step in (0, 1, 2):
        for index in range(plan.num_micro_batches):
            work(index, {"x": torch.zeros(1)}, order(step))

    assert receivers.most_held == quota
    last = plan.num_micro_batches - 1
    assert receivers.held[-1].endswith(f"micro-batch {last} of step 2"), "the oldest goes first"


def test_a_message_that_was_asked_for_is_not_asked_for_again() -> None:
    actor, recorder = actor_of(PIPELINE, 2, Receive), Recorder(2)
    work = work_of(actor, compile_case(PIPELINE), recorder, Lock())
    assert isinstance(work, Receiving)

    work.ask(1, order())
    first = work(0, {}, order())
    second = work(1, {}, order())

    assert [tag.split(", ")[1] for _, tag, _ in recorder.calls] == [
        "micro-batch 0 of step 0",
        "micro-batch 1 of step 0",
    ]
    assert first.keys() == second.keys() == {actor.makes}


def test_a_collective_hands_on_the_deadline_and_names_what_it_makes() -> None:
    actor, recorder = actor_of(DATA, 1, Collective), Recorder(1)

    made = work_of(actor, compile_case(DATA), recorder, Lock())(0, {"x": torch.zeros(1)}, order())

    assert made == {actor.makes: torch.tensor(1)}
    ((kind, tag, deadline_s),) = recorder.calls
    assert (kind, deadline_s) == ("collective", 7.0)
    assert actor.name in tag


def test_an_accumulation_gives_the_scaled_sum_with_the_last_micro_batch() -> None:
    plan = compile_case("accumulation")
    actor = actor_of("accumulation", 0, Accumulate)
    work = work_of(actor, plan, Recorder(0), Lock())
    _, total, scale = actor.accumulates[0]

    made = [
        work(i, {p: torch.tensor(1.0 + i) for p, _, _ in actor.accumulates}, order())
        for i in range(3)
    ]

    assert made[:2] == [{}, {}]
    assert made[2][total].item() == pytest.approx(6.0 * scale)


def test_an_accumulation_begins_anew_after_a_step_that_was_broken_off() -> None:
    plan = compile_case("accumulation")
    actor = actor_of("accumulation", 0, Accumulate)
    work = work_of(actor, plan, Recorder(0), Lock())
    parts = [part for part, _, _ in actor.accumulates]
    _, total, scale = actor.accumulates[0]
    work(0, {part: torch.tensor(1.0) for part in parts}, order())

    for index in range(3):
        made = work(index, {part: torch.tensor(1.0) for part in parts}, order(1))

    assert made[total].item() == pytest.approx(3.0 * scale)


def test_a_segment_computes_from_states_batch_and_scalars() -> None:
    plan, step = compile_case("one rank"), training_step("one rank")
    actor = next(a for a in plan.by_rank[0].actors if "features" in a.reads)
    values = {**step.states, **step.batches[0], **step.scalars}

    made = work_of(actor, plan, Recorder(0), Lock())(
        0, {key: values[key] for key in actor.reads}, order()
    )

    assert set(made) >= set(actor.outputs)
    assert all(isinstance(made[key], Tensor) for key in actor.outputs)


@pytest.mark.parametrize(("operator_s", "alone"), [(0.5 * SHORT_S, 5), (2 * SHORT_S, 3)])
def test_a_segment_waits_for_its_turn_while_its_operators_are_short(
    monkeypatch: pytest.MonkeyPatch, operator_s: float, alone: int
) -> None:
    num_operators, turn, ran_alone = 10, Lock(), 0
    # The clock is read before and after each segment; the first one, which warms up, takes longer.
    spent_s = [1.0, 0.0, *[operator_s * num_operators, 0.0] * 9]
    clock = accumulate(spent_s, initial=0.0)
    monkeypatch.setattr(work_module.time, "perf_counter", lambda: next(clock))

    def run(index: int, values: Values, order: StepOrder) -> Values:
        nonlocal ran_alone
        ran_alone += turn.locked()
        return values

    work = in_turn(run, num_operators, turn, (0, actor_of("one rank", 0, Compute)))
    for step in range(5):
        assert work(0, {"x": step}, order(step)) == {"x": step}

    assert ran_alone == alone
    assert not turn.locked()


def test_a_segment_that_fails_gives_its_turn_back() -> None:
    turn = Lock()

    def run(index: int, values: Values, order: StepOrder) -> Values:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        in_turn(run, 1, turn, (0, actor_of("one rank", 0, Compute)))(0, {}, order())

    assert not turn.locked()


def test_a_segment_does_not_wait_for_one_that_hangs() -> None:
    turn = Lock()

    with turn:
        work = in_turn(
            lambda index, values, order: values, 1, turn, (0, actor_of("one rank", 0, Compute))
        )
        assert work(0, {"x": 1}, order()) == {"x": 1}
        assert turn.locked()


def test_of_a_traced_step_it_is_noted_how_long_a_segment_waited_for_its_turn() -> None:
    actor, trace = actor_of("one rank", 0, Compute), Trace()

    in_turn(lambda index, values, order: values, 1, Lock(), (3, actor))(
        1, {}, replace(order(2), trace=trace)
    )

    (span,) = trace.spans
    assert (span.kind, span.rank, span.thread) == (SpanKind.TURN, 3, actor.thread)
    assert (span.actor, span.step, span.micro_batch) == (actor.name, 2, 1)
    assert span.begin_ns <= span.end_ns
