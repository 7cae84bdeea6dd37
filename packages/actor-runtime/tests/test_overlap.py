"""Collectives that are begun: who waits for them, and before what."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from actor_plans import compiled, run_step, start
from torch import Tensor

from sbp_core.boxing import BoxingStep, Pending
from sbp_core.compile import COMMIT, CompileOptions
from sbp_torch.boxing.local import LocalBackend, LocalCommunicator


class Begun(Pending):
    """What has begun; only the thread that did so may wait for it."""

    def __init__(self, pending: Pending, under_way: set[Begun]) -> None:
        self.pending, self.under_way = pending, under_way
        self.thread = threading.get_ident()
        under_way.add(self)

    def wait(self) -> Tensor:
        assert threading.get_ident() == self.thread, "another thread waits"
        self.under_way.discard(self)
        return self.pending.wait()


class Watched(LocalCommunicator):
    """Notes what is under way when its rank comes to the commit."""

    def __init__(self, backend: LocalBackend, rank: int) -> None:
        super().__init__(backend, rank)
        self.under_way: set[Begun] = set()
        self.num_begun = 0
        self.at_commit: list[int] = []

    def begin(self, step: BoxingStep, shard: Tensor, **rest: Any) -> Pending:
        self.num_begun += 1
        return Begun(super().begin(step, shard, **rest), self.under_way)

    def collective(self, step: BoxingStep, shard: Tensor, **rest: Any) -> Tensor:
        if rest["tag"].startswith(f"{COMMIT},"):
            self.at_commit.append(len(self.under_way))
        return super().begin(step, shard, **rest).wait()


class WatchedBackend(LocalBackend):
    def open(self, ranks: Sequence[int]) -> None:
        super().open(ranks)
        self.watched = {rank: Watched(self, rank) for rank in ranks}

    def communicator(self, rank: int) -> Watched:
        return self.watched[rank]


def test_a_rank_commits_when_all_that_it_has_begun_is_over() -> None:
    name, backend = "sharded states and overlap", WatchedBackend()

    with start(name, backend=backend) as session:
        run_step(session, name)

    for communicator in backend.watched.values():
        assert communicator.num_begun
        assert communicator.at_commit == [0]
        assert not communicator.under_way


def test_what_a_thread_has_begun_no_other_thread_waits_for() -> None:
    name, backend = "data parallel", WatchedBackend()
    plan = compiled(name, CompileOptions(overlap=True, boxing_thread=True, piece_s=0.0))

    with start(name, plan, backend) as session, start(name) as usual:
        found, wanted = (run_step(one, name) for one in (session, usual))

    assert found == wanted
    assert sum(communicator.num_begun for communicator in backend.watched.values())
