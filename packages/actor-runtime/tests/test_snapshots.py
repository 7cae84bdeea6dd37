"""Snapshots of running sessions: what an update waits for, and what a step without one costs."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from actor_plans import run_step, start, training_step, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sbp_core.runtime import NotFiniteStepError, Snapshot, StatePiece
from sbp_torch.runtime.devices import HostCopy, RankDevice
from sbp_torch.segments import segment_maker
from sbp_torch.testing.cases import assert_pieces

ALONE = "one rank"


class HoldingDevice(RankDevice):
    """Holds the copies of some tensors, by address, until a test lets them go."""

    def __init__(self, held: set[int]) -> None:
        self.held, self.opening = held, threading.Event()

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        if value.data_ptr() in self.held:
            assert self.opening.wait(20.0)
        return super().copy_aside(value, since, buffer)


def test_the_update_of_a_state_waits_for_its_own_copy_only() -> None:
    with start(ALONE) as session:
        *_, (_, late) = session.store.layout.overwritten
        early = next(iter(session.store.layout.overwritten))[1]
        shards = {name: session.shard(name, 0) for name in (early, late)}
        assert all(isinstance(value, Tensor) for value in shards.values())
        before = {name: value.clone() for name, value in shards.items()}
        states = session.state_dict()
        device = HoldingDevice({shards[late].data_ptr()})
        session.store.copier.device = device
        snapshot = session.snapshot()
        assert wait_until(lambda: any(t.name == "sbp snapshot" for t in threading.enumerate()))
        step = threading.Thread(target=run_step, args=(session, ALONE))
        step.start()

        is_early_updated = wait_until(lambda: not torch.equal(shards[early], before[early]))
        is_late_kept = torch.equal(shards[late], before[late])
        device.opening.set()
        step.join()

        assert is_early_updated and is_late_kept
        assert not torch.equal(shards[late], before[late])
    assert_pieces(snapshot.pieces(), states)


class SlowDevice(RankDevice):
    """Takes a while for each copy, as a test says."""

    def __init__(self, delays: Iterable[float]) -> None:
        self.delays = cycle(delays)

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        time.sleep(next(self.delays))
        return super().copy_aside(value, since, buffer)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([ALONE, "sharded states"]),
    actions=st.lists(
        st.sampled_from(["step", "step", "snapshot", "snapshot", "release", "undo", "load"]),
        max_size=9,
    ),
    delays=st.lists(st.sampled_from([0.0, 1e-4, 1e-3]), min_size=1, max_size=5),
)
def test_every_snapshot_is_of_its_moment_whatever_is_done(
    name: str, actions: list[str], delays: list[float]
) -> None:
    step = training_step(name)
    bad = {k: v * torch.nan if v.is_floating_point() else v for k, v in step.batches[0].items()}
    held: list[tuple[Snapshot, dict[str, Tensor]]] = []
    with start(name) as session:
        session.only_finite = True
        session.store.copier.device = SlowDevice(delays)
        first = session.state_dict()
        for index, action in enumerate(actions):
            if action == "step":
                run_step(session, name, index % len(step.batches))
            elif action == "snapshot":
                held.append((session.snapshot(), session.state_dict()))
            elif action == "release" and held:
                held.pop(0)[0].release()
            elif action == "undo":
                with pytest.raises(NotFiniteStepError):
                    session.step(bad, step.scalars)
            elif action == "load":
                session.load_state_dict(first)
    for snapshot, states in held:
        assert_pieces(snapshot.pieces(), states)


def shard_bytes(session: Any, part: tuple[int, str]) -> int:
    value = session.shard(part[1], part[0])
    assert isinstance(value, Tensor)
    return value.nbytes


class Memory(bytearray):
    """Of a copy; says when it is let go of."""


class CountingDevice(SlowDevice):
    """Counts the bytes of all copies that are alive."""

    def __init__(self, delays: Iterable[float]) -> None:
        super().__init__(delays)
        self.lock, self.now_bytes, self.most_bytes = threading.RLock(), 0, 0

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        if buffer is None:
            memory = Memory(value.nbytes)
            buffer = torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
            weakref.finalize(memory, self._count, -value.nbytes)
            self._count(value.nbytes)
        return super().copy_aside(value, since, buffer)

    def _count(self, size_bytes: int) -> None:
        with self.lock:
            self.now_bytes += size_bytes
            self.most_bytes = max(self.most_bytes, self.now_bytes)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from([ALONE, "sharded states"]),
    limits=st.lists(st.sampled_from([0, 64, 512, 4096, None]), min_size=1, max_size=3),
    copies=st.lists(st.sampled_from([0.0, 1e-4, 1e-3]), min_size=1, max_size=5),
    writes=st.lists(st.sampled_from([0.0, 1e-4, 1e-3]), min_size=1, max_size=5),
)
def test_copies_stay_within_the_limit_and_are_of_their_moment(
    name: str, limits: list[int | None], copies: list[float], writes: list[float]
) -> None:
    pauses = cycle(writes)

    def copied(piece: StatePiece) -> StatePiece:
        time.sleep(next(pauses))
        value = piece.value.clone() if isinstance(piece.value, Tensor) else piece.value
        return replace(piece, value=value)

    def read(snapshot: Snapshot) -> list[StatePiece]:
        found = []
        with snapshot:
            pieces = snapshot.pieces()
            for _ in snapshot.slices():
                found.append(copied(next(pieces)))  # no name: the piece is let go of
        return found

    with start(name) as session, ThreadPoolExecutor(1) as writer:
        for index, limit_bytes in enumerate(limits):
            session.store.copier.device = device = CountingDevice(copies)
            session.store.copier._buffers.clear()
            session.store.copier._kept_bytes = 0
            states = session.state_dict()
            reading = writer.submit(read, session.snapshot(limit_bytes=limit_bytes))
            run_step(session, name, index % 2)
            assert_pieces(reading.result(20.0), states)
            if limit_bytes is not None:
                # A thread may be about to let go of the last one.
                overwritten = session.store.layout.overwritten
                largest = max(shard_bytes(session, part) for part in overwritten)
                assert device.most_bytes <= limit_bytes + largest
                assert device.now_bytes <= limit_bytes


def test_an_update_waits_for_room_no_longer_than_other_ranks_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with start(ALONE, deadline_s=0.1) as session:
        run_step(session, ALONE)
        states, snapshot = session.state_dict(), session.snapshot(limit_bytes=0)
        run_step(session, ALONE, 1)  # nobody reads

        assert_pieces(snapshot.pieces(), states)
    (record,) = caplog.records
    assert "copies now go beyond 0 B, because other ranks would time out" in record.getMessage()


def test_without_a_snapshot_there_is_no_thread_and_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    begin = threading.Thread.start
    with start(ALONE) as session:
        monkeypatch.setattr(
            threading.Thread, "start", lambda self: (started.append(self.name), begin(self))[1]
        )
        monkeypatch.setattr(
            "sbp_actor_runtime.work.telling_segment_function",
            lambda *_: pytest.fail("a segment that tells was made"),
        )
        for index in range(2):
            run_step(session, ALONE, index)

        assert started == []


def test_a_compiled_segment_is_told_of_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    # As with Inductor and CUDA graphs, whose functions cannot call back.
    with start(ALONE) as usual:
        losses = [run_step(usual, ALONE, index) for index in range(3)]
    make_segment = segment_maker("eager")
    monkeypatch.setattr("sbp_actor_runtime.runtime.segment_maker", lambda *_, **__: make_segment)
    taken = []
    with start(ALONE, compile="inductor") as session:
        session.store.copier.device = SlowDevice([0.005])  # or all is copied before any update
        for index, loss in enumerate(losses):
            taken.append((session.snapshot(), session.state_dict()))
            assert torch.equal(run_step(session, ALONE, index), loss)
    for snapshot, states in taken:
        assert_pieces(snapshot.pieces(), states)
    assert set(training_step(ALONE).states) == set(states)
