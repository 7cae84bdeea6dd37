"""What a session says of threads that wait, compute, or have nothing to do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from actor_plans import DATA, PIPELINE, gate, operator, start, training_step, wait_until

from sbp_actor_runtime import status
from sbp_actor_runtime.session import ActorSession
from sbp_core.compile import Collective
from sbp_torch.testing.cases import compile_case
from sbp_torch.testing.failing_plans import plan_with


@pytest.fixture(autouse=True)
def closed_gate() -> Iterator[None]:
    gate.clear()
    yield
    gate.set()


def lines_of(session: ActorSession, rank: int) -> list[str]:
    """Return the lines about the threads of a rank."""
    found: dict[str, list[str]] = {}
    for line in session.status():
        if not line.startswith(" "):
            head = line
        found.setdefault(head, []).append(line)
    return [line for head in found if head.startswith(f"rank {rank},") for line in found[head]]


def test_a_rank_that_computes_is_told_from_those_that_wait_for_it() -> None:
    plan, actor = plan_with(compile_case(DATA), 2, operator("wait_at_gate"))
    step = training_step(DATA)
    with start(DATA, plan) as session:
        running = threading.Thread(target=session.step, args=(step.batches[0], step.scalars))
        running.start()
        workers = {rank: worker for (rank, _), worker in session.workers.items()}
        own = workers[0]
        assert wait_until(
            lambda: (
                workers[2].current_actor == actor
                and isinstance(own.order[own.place][0].actor, Collective)
            )
        )

        late, other = lines_of(session, 2), lines_of(session, 0)
        gate.set()
        running.join(60.0)

        place = [post.actor.name for post, _ in workers[2].order].index(actor)
        assert late[0] == (
            f"rank 2, thread compute: at {actor}, micro-batch 0; {place} of "
            f"{len(workers[2].order)} firings of the step are done"
        )
        assert late[1] == "  computes"
        assert other[1] in ("  is in boxing: all-reduce", "  is in boxing: all-gather")
        assert other[2] == "  last boxing:"
        assert re.fullmatch(r".* \(all-.*\), step 1, .*: begun .*s ago, not ended", other[3])
        assert session.steps_done == 1
        assert lines_of(session, 0)[0] == "rank 0, thread compute: between steps"
        assert lines_of(session, 0)[1] == "  last boxing:"
        last = lines_of(session, 0)[2]
        assert re.fullmatch(r"    commit \(all-reduce\), step 1, .*: ended .* ago, took .*s", last)
        assert session.status()[0] == "1 step is done"


def test_what_an_actor_waits_for_is_told_with_registers_that_are_full_and_what_was_sent() -> None:
    plan, actor = plan_with(compile_case(PIPELINE), 1, operator("wait_at_gate"))
    step = training_step(PIPELINE)
    with start(PIPELINE, plan) as session:
        running = threading.Thread(target=session.step, args=(step.batches[0], step.scalars))
        running.start()
        assert wait_until(
            lambda: (
                any(worker.current_actor == actor for worker in session.workers.values())
                and any("waits for: data" in line for line in lines_of(session, 0))
                # Rank 0 has gone on as far as its credits go.
                and any(re.search(r": 2 of 2, for backward", one) for one in lines_of(session, 0))
            )
        )

        told = "\n".join(lines_of(session, 0))
        gate.set()
        running.join(60.0)

    assert "  waits for: data in register" in told
    assert "are full; alive of quota, and who reads last:\n" in told
    assert re.search(r"\n    forward\S+: 2 of 2, for backward", told)
    assert re.search(r" \(send\), step 1, micro-batch \d: ended .* ago, took ", told)


def test_a_session_that_has_not_begun_or_is_over_says_so() -> None:
    session = start(DATA)
    assert lines_of(session, 3) == [
        "rank 3, thread compute: between steps",
        f"  registers: 0 of {len(session.workers[3, 'compute'].outputs)} are full",
    ]
    session.close()

    assert session.status() == ["0 steps are done; the session is closed"]


def test_of_many_actors_that_box_the_last_ones_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_MOST", 2)
    step = training_step(DATA)
    with start(DATA) as session:
        session.step(step.batches[0], step.scalars)
        told = lines_of(session, 0)
        boxed = sorted(session.workers[0, "compute"].boxed.items(), key=lambda one: -one[1].began_s)

    first = told.index("  last boxing:") + 1
    assert [line.split()[0] for line in told[first : first + 2]] == [name for name, _ in boxed[:2]]
    assert told[first + 2].startswith("  registers: ")
    assert len(boxed) > 2
