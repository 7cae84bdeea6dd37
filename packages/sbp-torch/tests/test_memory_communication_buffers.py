"""What transports between processes hold beside the shards."""

from __future__ import annotations

import pytest

from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.boxing.slices import bounds_of, itemsize, volume
from sbp_core.boxing.step import StepKind
from sbp_core.compile.actors import BoxingActor, Collective, Receive, Send
from sbp_core.memory import MemoryKind, predict_memory, prediction
from sbp_core.memory.prediction import buffer_bytes, early_receive_bytes
from sbp_torch.testing.cases import CASES, compile_case


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", CASES)
def test_buffers_and_shards_are_what_a_collective_holds(name: str) -> None:
    plan = compile_case(name)

    for part in plan.ranks:
        found = buffer_bytes(plan, part.rank)
        assert found.keys() == {a.name for a in part.actors if isinstance(a, BoxingActor)}
        for actor in part.actors:
            if not isinstance(actor, Collective):
                continue
            step = plan.steps[actor.step]
            source, target = (
                bounds_of(step.shape, *step.source),
                bounds_of(step.shape, *step.target),
            )
            shards = (volume(source[part.rank]) + volume(target[part.rank])) * itemsize(step.dtype)
            assert found[actor.name] + shards == step_memory_bytes(step)[part.rank]
            if step.kind is StepKind.ALL_REDUCE:
                assert found[actor.name] == 0


@pytest.mark.parametrize("name", CASES)
def test_what_is_packed_for_others_is_what_they_receive(name: str) -> None:
    plan = compile_case(name)
    sent, received = 0, 0

    for part in plan.ranks:
        buffers = buffer_bytes(plan, part.rank)
        sent += sum(buffers[a.name] for a in part.actors if isinstance(a, Send))
        received += sum(buffers[a.name] for a in part.actors if isinstance(a, Receive))

    assert sent == received
    assert (sent > 0) == (len(plan.stages) > 1)


def test_processes_hold_buffers_at_their_peak_and_threads_do_not() -> None:
    plan = compile_case("sharded states")

    threads, processes = predict_memory(plan), predict_memory(plan, processes=True)

    assert not any(MemoryKind.COMMUNICATION in rank.kinds for rank in threads.ranks.values())
    assert any(rank.kinds.get(MemoryKind.COMMUNICATION, 0) for rank in processes.ranks.values())
    for rank, memory in processes.ranks.items():
        most = max(buffer_bytes(plan, rank).values())
        assert threads.ranks[rank].peak <= memory.peak <= threads.ranks[rank].peak + most
        assert memory.resting == threads.ranks[rank].resting
        assert sum(memory.kinds.values()) == memory.peak


def test_what_is_asked_for_ahead_has_its_memory_until_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = compile_case("pipeline with overlap")
    early = {rank: tuple(early_receive_bytes(plan, rank)) for rank in plan.by_rank}
    found = predict_memory(plan, processes=True)
    monkeypatch.setattr(prediction, "early_receive_bytes", lambda *_: ())
    without = predict_memory(plan, processes=True)

    for part in plan.ranks:
        receives = [actor for actor in part.actors if isinstance(actor, Receive)]
        firings = sum(actor.num_firings(plan.repetitions) for actor in receives)
        assert len(early[part.rank]) == firings
        held = found.ranks[part.rank].peak - without.ranks[part.rank].peak
        assert 0 <= held <= max(one.size_bytes for one in early[part.rank])
    assert found.ranks[0].peak > without.ranks[0].peak
