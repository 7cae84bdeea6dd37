"""The actor runtime: starts a worker thread for every thread of every local rank, and runs steps.

A step is all or nothing: new states take force when every worker has finished; after a failure the
states are those from before the step, and the error names the rank and the actor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from queue import SimpleQueue

from torch import Tensor

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.worker import Message, StepOrder, Stop, ThreadId, Worker, WorkerReport
from sbp_core.boxing.backend import BoxingBackend
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import BoxingError, RunError, SbpError
from sbp_core.runtime.contract import Number, Runtime, Session, StepResult
from sbp_core.runtime.store import StateStore, feed


class ActorRuntime(Runtime):
    """Runs the local ranks of a plan on threads of this process."""

    def __init__(self, config: ActorConfig) -> None:
        self.config = config

    def start(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor],
        backend: BoxingBackend,
        ranks: Sequence[int] | None = None,
    ) -> Session:
        """See `Runtime.start`."""
        backend.open([part.rank for part in plan.ranks])
        try:
            here = tuple(ranks) if ranks is not None else backend.local_ranks()
            return ActorSession(plan, states, backend, here, self.config)
        except BaseException:
            backend.close()
            raise


def build(config: ActorConfig) -> ActorRuntime:
    """Return the runtime. Kind `runtime`, name `actor`."""
    return ActorRuntime(config)


class ActorSession(Session):
    """The workers of the local ranks and the states they share between steps."""

    def __init__(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor],
        backend: BoxingBackend,
        ranks: Sequence[int],
        config: ActorConfig,
    ) -> None:
        self.plan, self.backend, self.config = plan, backend, config
        self.store = StateStore(plan, ranks)
        self.store.load(states)
        self.reports: SimpleQueue[WorkerReport] = SimpleQueue()
        self.steps_done = 0
        self.failure: SbpError | None = None
        self.closed = False
        self.workers: dict[ThreadId, Worker] = {}
        for rank in ranks:
            for name in plan.by_rank[rank].orders:
                self.workers[(rank, name)] = Worker(
                    plan,
                    (rank, name),
                    backend.communicator(rank),
                    self._post,
                    self.reports.put,
                    config.threads_per_rank,
                )
        for worker in self.workers.values():
            worker.os_thread.start()

    def _post(self, thread: ThreadId, message: Message) -> None:
        self.workers[thread].inbox.put(message)

    def step(self, batch: Mapping[str, Tensor], scalars: Mapping[str, Number]) -> StepResult:
        """See `Session.step`."""
        if self.closed or self.failure is not None:
            raise RunError(
                "the session has ended" if self.closed else "the session has failed before",
                where=str(self.failure or ""),
                todo="start a new session from state_dict()",
            )
        fed = feed(self.plan, batch, scalars, self.store.values)
        first = self.steps_done == 0
        deadline_s = self.config.first_deadline_s if first else self.config.deadline_s
        for (rank, _), worker in self.workers.items():
            worker.inbox.put(
                StepOrder(self.steps_done, self.store.values[rank], fed[rank], deadline_s)
            )
        reports = [self._next_report() for _ in self.workers]
        failed = [report for report in reports if report.error is not None]
        if failed:
            raise self._failed(failed)
        results: dict[str, Tensor] = {}
        for report in reports:
            results |= report.results
            self.store.values[report.thread[0]] |= report.new_states
        self.steps_done += 1
        return StepResult(outputs=results)

    def _next_report(self) -> WorkerReport:
        """Wait for a worker; after a first failure the others are unblocked."""
        report = self.reports.get()
        if report.error is not None and self.failure is None:
            self.failure = RunError(str(report.error))
            self.backend.fail(report.error)
            for worker in self.workers.values():
                worker.inbox.put(Stop())
        return report

    def _failed(self, failed: Sequence[WorkerReport]) -> RunError:
        """Make the error: the first cause is a failure that is no consequence of another."""
        causes = [r for r in failed if not isinstance(r.error, BoxingError | RunError)]
        report = (causes or list(failed))[0]
        rank, thread = report.thread
        error = RunError(
            f"rank {rank} failed in actor {report.actor!r}: {report.error}",
            where=(f"thread {thread!r}, step {self.steps_done}",),
            todo="states are those from before the step: state_dict() still gives them",
        )
        error.__cause__ = report.error
        self.failure = error
        return error

    def shard(self, name: str, rank: int) -> Tensor | Number:
        """See `Session.shard`."""
        return self.store.values[rank][name]

    def state_dict(self) -> dict[str, Tensor]:
        """See `Session.state_dict`."""
        return self.store.whole()

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.load_state_dict`."""
        self.store.load(states)

    def close(self) -> None:
        """See `Session.close`."""
        if self.closed:
            return
        self.closed = True
        for worker in self.workers.values():
            worker.inbox.put(Stop())
        self.backend.close()
        for worker in self.workers.values():
            worker.os_thread.join(timeout=10.0)
