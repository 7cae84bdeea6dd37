"""What a thread asks for before it needs it."""

from __future__ import annotations

from typing import Any

import pytest

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_core.boxing import Delivery, Pending
from sbp_core.compile import Receive, Send, early_receives
from sbp_core.runtime import NotFiniteStepError
from sbp_torch.boxing.local import LocalBackend, LocalCommunicator
from sbp_torch.testing.cases import CASES, compile_case

#: Two stages of two ranks each, four micro-batches, one thread a rank.
PIPELINE = "pipeline with overlap"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """What each rank of a session asks for and sends, in order."""
    found: dict[int, list[str]] = {}

    def asks(self: LocalCommunicator, step: Any, shard: Any, **rest: Any) -> Pending:
        found.setdefault(self.rank, []).append(f"ask {rest['tag']}")
        return begin_receive(self, step, shard, **rest)

    def sends(self: LocalCommunicator, step: Any, shard: Any, **rest: Any) -> Delivery:
        found.setdefault(self.rank, []).append(f"send {rest['tag']}")
        return send(self, step, shard, **rest)

    begin_receive, send = LocalCommunicator.begin_receive, LocalCommunicator.send
    monkeypatch.setattr(LocalCommunicator, "begin_receive", asks)
    monkeypatch.setattr(LocalCommunicator, "send", sends)
    return found


def test_a_rank_asks_for_what_it_receives_next_before_it_computes(
    calls: dict[int, list[str]],
) -> None:
    step, plan = CASES[PIPELINE].step, compile_case(PIPELINE)

    with ActorRuntime(ActorConfig()).start(plan, step.states, LocalBackend()) as session:
        session.step(step.batches[0], step.scalars)

    for part in plan.ranks:
        (thread,) = part.orders
        order = part.orders[thread]
        early = early_receives(part, thread)
        expected = []
        for place, (name, index) in enumerate(order):
            for receive in early.get(place, ()):
                expected.append(("ask", *order[receive]))
            if isinstance(part.by_name[name], Send):
                expected.append(("send", name, index))
        made = [
            f"{kind} {name.removeprefix('send ').removeprefix('receive ')}, "
            f"micro-batch {index} of step 0"
            for kind, name, index in expected
        ]
        assert calls[part.rank] == made
    assert calls[0][0].startswith("ask "), "the first stage asks for a gradient before it sends"


def test_a_step_that_may_end_early_asks_for_nothing_behind_its_end(
    calls: dict[int, list[str]],
) -> None:
    step, plan = CASES[PIPELINE].step, compile_case(PIPELINE)
    batch = {
        name: value * float("nan") if value.is_floating_point() else value
        for name, value in step.batches[0].items()
    }

    with ActorRuntime(ActorConfig()).start(plan, step.states, LocalBackend()) as session:
        session.only_finite = True
        with pytest.raises(NotFiniteStepError):
            session.step(batch, step.scalars)
        calls.clear()
        session.step(step.batches[0], step.scalars)

    for part in plan.ranks:
        receives = [a for a in part.actors if isinstance(a, Receive)]
        asked = [call for call in calls[part.rank] if call.startswith("ask ")]
        assert len(asked) == len(set(asked))
        assert len(asked) == sum(a.num_firings(plan.repetitions) for a in receives)
