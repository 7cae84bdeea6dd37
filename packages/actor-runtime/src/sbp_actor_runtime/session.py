"""`ActorSession`: run the training steps of a plan, with a worker for each thread of a local rank.

After a failure or an interrupt the workers end, and the session is over. Before the commit of the
step (`sbp_core.compile.commit`), such an end leaves the states unchanged on all ranks. After the
commit, updates overwrite states. A failure then leaves states of two different steps, which are not
given out. New states that do not overwrite old ones are put in force when every worker has
finished. An interrupt after the commit waits until the step is done, and the session continues.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from sbp_actor_runtime.between_steps import BetweenSteps
from sbp_actor_runtime.commitment import Commitment
from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.message import Message, StepOrder, ThreadId, WorkerReport
from sbp_actor_runtime.status import worker_status
from sbp_actor_runtime.worker import ActorThread
from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import BoxingError, RunError
from sbp_core.interrupts import HeldInterrupts
from sbp_core.runtime import (
    BatchIs,
    NotFiniteStepError,
    Number,
    Session,
    Snapshot,
    StatePiece,
    StepResult,
    check_destination,
    check_not_forked,
    gather_routes,
)
from sbp_torch.runtime import (
    Feeder,
    Values,
    not_finite,
    partially_updated,
    step_failure,
    step_interrupted,
    store_of,
    tells_of_partial_update,
    undone_error,
)
from sbp_torch.segments import SegmentMaker, failed_call

logger = logging.getLogger(__name__)

#: Seconds to wait for threads to end, after a failure and on closing; then they are abandoned.
GRACE_S = 10.0

#: Fraction of the deadline of other ranks for which an update waits for room.
ROOM_PATIENCE = 0.5


class ActorSession(Session):
    """The workers of the local ranks and the states they share between steps."""

    def __init__(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor] | Session,
        backend: BoxingBackend,
        ranks: Sequence[int],
        config: ActorConfig,
        make_segment: SegmentMaker | None = None,
        *,
        owns_backend: bool = True,
        keeps: bool = False,
    ) -> None:
        self.plan, self.config = plan, config
        self.backend, self.owns_backend = backend, owns_backend
        self.store = store_of(plan, ranks, states, keeps=keeps)
        self.feeder = Feeder(plan, ranks)
        #: Reports of the workers; None is put in when an interrupt is held, to wake `_collect`.
        self.reports: SimpleQueue[WorkerReport | None] = SimpleQueue()
        self.local_ranks, self.steps_done = tuple(ranks), 0
        self.together = BetweenSteps(plan, self.store, backend, config.deadline_s)
        #: Whether all processes are known to run the same plan.
        self.has_agreed = False
        #: The states at the beginning of a step; `store.values` until the step is committed, and
        #: after one that has failed.
        self.states_before: dict[int, Values] = {}
        self.failure: RunError | None = None
        self.closed = False
        self._process = os.getpid()
        self._make_worker = partial(
            ActorThread,
            plan,
            ranks_here=ranks,
            post=self._post,
            report=self.reports.put,
            num_threads=config.threads_per_rank
            or max(1, torch.get_num_threads() // max(1, len(ranks))),
            turn=threading.Lock(),
            device=self.store.device,
            make_segment=make_segment,
        )
        self._start_workers()

    def _start_workers(self) -> None:
        """Make the workers, with all credits and no data, and start their threads."""
        self.workers: dict[ThreadId, ActorThread] = {
            (rank, name): self._make_worker(
                thread=(rank, name), communicator=self.backend.communicator(rank)
            )
            for rank in self.local_ranks
            for name in self.plan.by_rank[rank].orders
        }
        try:
            for worker in self.workers.values():
                worker.os_thread.start()
        except BaseException:
            self._stop_workers()
            raise

    def _post(self, thread: ThreadId, message: Message) -> None:
        self.workers[thread].inbox.put(message)

    # Steps.

    def step(
        self,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        batch_is: BatchIs = "global",
    ) -> StepResult:
        """See `Session.step`."""
        self._check_usable()
        self.store.refresh()
        fed = self.store.device.put_batches(self.feeder.feed(batch, scalars, batch_is))
        first = self.steps_done == 0
        deadline_s = self.config.first_deadline_s if first else self.config.deadline_s
        for worker in self.workers.values():
            worker.has_overwritten = False
        self.states_before = self.store.values
        commitment, is_over = Commitment(), False
        try:
            self._agree_on_plan(deadline_s)
            with HeldInterrupts(heard=lambda _: self.reports.put(None)) as interrupts:
                for (rank, _), worker in self.workers.items():
                    states = self.store.values[rank]
                    worker.inbox.put(
                        StepOrder(
                            self.steps_done,
                            states,
                            fed[rank],
                            deadline_s,
                            commitment,
                            self.watch,
                            self.trace,
                            self.only_finite,
                            self.store.copier.before_overwrite(rank),
                        )
                    )
                reports = self._collect(interrupts, commitment)
                failed = [report for report in reports if report.error is not None]
                if failed:
                    raise self._root_cause(failed)
                is_undone = self._is_to_undo(reports)
                results = {} if is_undone else self._commit(reports)
                is_over = True
                self.states_before = {}  # else `load_state_dict` could not free old states
                if is_undone:
                    raise self._undo(reports)
        except BoxingError as error:
            raise self._fail(error) from error
        except BaseException as error:
            # An interrupt after the commit leaves the session as after a step.
            if not is_over and self.failure is None:
                self._give_up(error)
            raise
        return StepResult(outputs=results)

    def _give_up(self, error: BaseException) -> None:
        """Abort the session in the middle of a step that was interrupted."""
        self._stop_workers()  # so that no worker begins an update
        is_partial = self._is_partially_updated()
        failure = step_interrupted(self.local_ranks[0], self.steps_done, error, is_partial)
        self._abort(error, failure)

    def _is_to_undo(self, reports: Sequence[WorkerReport]) -> bool:
        """Whether the loss of a step is not finite, and no state has been overwritten."""
        if not self.only_finite or any(worker.has_overwritten for worker in self.workers.values()):
            return False
        return any(not_finite(report.results) for report in reports)

    def _undo(self, reports: Sequence[WorkerReport]) -> NotFiniteStepError:
        """Restore the session to its state before a step, and return the error of the step."""
        if any(report.has_refused for report in reports):
            # Registers hold data of the unfinished step, so all workers begin anew.
            self._stop_workers()
            self._join()
            self._start_workers()
        results = {name: value for one in reports for name, value in one.results.items()}
        return undone_error(results, self.steps_done)

    def _commit(self, reports: Sequence[WorkerReport]) -> dict[str, Tensor]:
        """Commit the new states of all ranks; return the results of the step."""
        results: dict[str, Tensor] = {}
        values = {rank: dict(held) for rank, held in self.store.values.items()}
        # If ranks have different results, the lowest rank's counts, as in the reference runtime,
        # and not the one of the rank that reported last.
        for report in sorted(reports, key=lambda one: one.thread, reverse=True):
            results |= report.results
            values[report.thread[0]] |= report.new_states
        # One assignment, so that an interrupt leaves all ranks either before the step or after it.
        self.store.commit(values)
        self.steps_done += 1
        return results

    def _agree_on_plan(self, deadline_s: float) -> None:
        """Check, once, that every process runs the same plan, by comparing hashes of the plan.

        Raises:
            BoxingError: the plans differ, or a rank did not take part.
        """
        if self.backend.spans_processes and not self.has_agreed:
            self.together.agree("plan", self.plan.hash, deadline_s)
            self.has_agreed = True

    @property
    def _over(self) -> str:
        return "the session is closed" if self.closed else "the session ended in a failed step"

    def _check_usable(self) -> None:
        check_not_forked(self._process)
        if self.closed or self.failure is not None:
            raise RunError(
                self._over,
                where=self.failure.what if self.failure is not None else "",
                todo="start a new session from a checkpoint"
                if self._is_partially_updated()
                else "start a new session from state_dict()",
            )

    def _collect(self, interrupts: HeldInterrupts, commitment: Commitment) -> list[WorkerReport]:
        """Wait for the reports of all workers; after a first failure, stop the other workers.

        Raises:
            BaseException: the interrupt of the step, which is aborted.
        """
        reports: list[WorkerReport] = []
        end: float | None = None
        while len(reports) < len(self.workers):
            try:
                left_s = None if end is None else max(0.0, end - time.monotonic())
                report = self.reports.get(timeout=left_s)
            except Empty:
                break
            if report is None:  # perhaps from the end of an earlier step
                if interrupts.error is not None and end is None and commitment.try_abort():
                    self._give_up(interrupts.error)
                    interrupts.raise_held()
                continue
            reports.append(report)
            if report.error is not None and end is None:
                end = time.monotonic() + GRACE_S
                self._abort(
                    report.error, self._make_failure(report, self._unreported_threads(reports))
                )
        return reports

    def _unreported_threads(self, reports: Sequence[WorkerReport]) -> list[str]:
        """Describe the threads that have not reported, each with its current actor."""
        reported = {report.thread for report in reports}
        return [
            f"rank {rank}, thread {name!r}: at {worker.current_actor!r}"
            for (rank, name), worker in self.workers.items()
            if (rank, name) not in reported and worker.current_actor
        ]

    def _abort(self, cause: BaseException, failure: RunError) -> None:
        """Abort the session: unblock calls that wait for a rank, stop the workers."""
        self.failure = failure
        # Other processes learn from `failure` alone that states belong to two steps.
        self.backend.fail(failure if tells_of_partial_update(failure.what) else cause)
        self._stop_workers()

    def _fail(self, error: BoxingError) -> RunError:
        """Abort the session, because another rank cannot be reached; return the error."""
        failure = error.replaced(RunError)
        self._abort(error, failure)
        return failure

    def _stop_workers(self) -> None:
        for worker in self.workers.values():
            worker.stop()

    def _root_cause(self, failed: Sequence[WorkerReport]) -> RunError:
        """Return the error of the step: the first failure that is not a consequence of another.

        A rank that waited for a failed one fails with a `BoxingError`, before or after that rank.
        """
        causes = [
            report
            for report in failed
            if not report.stopped and not isinstance(report.error, BoxingError | RunError)
        ]
        if causes and causes[0] is not failed[0]:
            self.failure = self._make_failure(causes[0], [])
        assert self.failure is not None, "the first failure was recorded"
        if self._is_partially_updated() and not tells_of_partial_update(self.failure.what):
            # Another rank has failed, but all reports here are consequences.
            self.failure = self._make_failure((causes or failed)[0], [])
        return self.failure

    def _make_failure(self, report: WorkerReport, others: Sequence[str]) -> RunError:
        """Make the error for one worker's failure."""
        rank, thread = report.thread
        waited = isinstance(report.error, BoxingError | RunError)
        assert report.error is not None, "what is reported here has failed"
        return step_failure(
            rank,
            self.steps_done,
            report.actor,
            report.error,
            is_partial=self._is_partially_updated() or tells_of_partial_update(str(report.error)),
            where=(
                failed_call(report.error),
                f"thread {thread!r}, step {self.steps_done}",
                *(others if waited else ()),
            ),
        )

    def status(self) -> list[str]:
        """See `Session.status`."""
        done = self.steps_done
        steps = "1 step is done" if done == 1 else f"{done} steps are done"
        ended = "the session is closed" if self.closed else "it ended in a failed step"
        if self.closed or self.failure is not None:
            return [f"{steps}; {ended}"]
        workers = list(self.workers.values())
        return [steps, *(line for one in workers for line in worker_status(one, self.plan.steps))]

    # States.

    def _is_partially_updated(self) -> bool:
        """Whether a step that did not finish has overwritten some states."""
        is_whole = self.store.values is not self.states_before
        return not is_whole and any(worker.has_overwritten for worker in self.workers.values())

    def shard(self, name: str, rank: int) -> Tensor | Number:
        """See `Session.shard`."""
        self.store.refresh()
        return self.store.shard(name, rank)

    def _check_whole(self) -> None:
        """Refuse to hand out states that belong to two steps, as far as this process can know."""
        if self._is_partially_updated():
            self._join()  # so that no thread writes after the check
            raise partially_updated("" if self.failure is None else self.failure.what)
        # A rank of another process may have failed in its update after the local ranks finished.
        if tells_of_partial_update(reason := self.backend.failure_reason()):
            raise partially_updated(reason)
        self.store.refresh()

    def pieces(self, *, among: Collection[int] | None = None) -> Iterator[StatePiece]:
        """See `Session.pieces`."""
        self._check_whole()
        return self.store.pieces(among)

    def snapshot(self, *, limit_bytes: int | None = None) -> Snapshot:
        """See `Session.snapshot`."""
        self._check_whole()
        return self.store.snapshot(
            self.steps_done,
            limit_bytes=limit_bytes,
            patience_s=ROOM_PATIENCE * self.config.deadline_s,
        )

    def gather(self, name: str, *, to: int | None = None) -> Tensor | None:
        """See `Session.gather`."""
        gather_routes(self.plan, name, to)  # raises in all processes alike
        return self._gather([name], repr(name), to).get(name)

    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """See `Session.state_dict`."""
        check_destination(self.plan, to)
        return self._gather(self.store.layout.names, "all states", to)

    def _gather(self, names: Sequence[str], what: str, to: int | None) -> dict[str, Tensor]:
        """Return whole states by name, on rank `to`; without messages if all ranks are here."""
        self._check_whole()
        if not self.backend.spans_processes:
            return {name: self.store.whole(name) for name in names}
        if self.closed or self.failure is not None:
            raise RunError(
                f"ranks of other processes cannot be asked for {what} any more: {self._over}",
                where=self.failure.what if self.failure is not None else "",
                accepted="gather() and state_dict() before that; pieces(), which sends nothing",
                todo="save the pieces() of every process",
            )
        try:
            self._agree_on_plan(self.config.first_deadline_s)
            where = "all ranks" if to is None else f"rank {to}"
            call = f"{what} for {where} after step {self.steps_done}"
            self.together.agree("states to gather", call)
            found = {name: self.together.gather(name, to) for name in names}
        except BoxingError as error:
            raise self._fail(error) from error
        except BaseException as error:
            self._abort(error, RunError(f"gathering {what} was interrupted by {error!r}"))
            raise
        return {name: value for name, value in found.items() if value is not None}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.load_state_dict`."""
        check_not_forked(self._process)
        self.store.load(states)

    def replace(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.replace`."""
        check_not_forked(self._process)
        self._check_whole()
        self.store.replace(states)

    def widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        """See `Session.widen`."""
        self._check_whole()
        self.store.widen(plan, states)
        self.plan = self.together.plan = self.store.plan

    def __exit__(self, *raised: object) -> None:
        """Close; report an error that ends the block to the ranks of other processes."""
        error, is_over = raised[1], self.closed or self.failure is not None
        if isinstance(error, BaseException) and not is_over and os.getpid() == self._process:
            self.backend.fail(error)
        self.close()

    def close(self) -> None:
        """See `Session.close`. States can still be read."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._process:
            return  # a forked child has no threads to end, and its connections are its parent's
        self._stop_workers()
        try:
            if self.owns_backend:
                self.backend.close()
        finally:
            self._join()
            self.store.close()

    def _join(self) -> None:
        end = time.monotonic() + GRACE_S
        for (rank, name), worker in self.workers.items():
            worker.os_thread.join(timeout=max(0.0, end - time.monotonic()))
            if worker.os_thread.is_alive():
                logger.warning(
                    "rank %s, thread %r is still in %r and is abandoned",
                    rank,
                    name,
                    worker.current_actor,
                )
