"""`ActorThread`: run the actors (tasks) of one thread of one rank, in the order of the plan.

An actor fires (runs once) when its inputs have arrived, and its outputs have credits (free places).
Threads exchange two messages. `FilledRegister` gives values to a consumer; `Acknowledge` gives the
credit back. Within a thread both are plain calls. A worker never reads the data of another worker:
everything that it needs arrives in its inbox. All messages of a step are in the inboxes before the
last worker reports, so every step begins with the full credits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from sbp_actor_runtime.message import (
    Acknowledge,
    FilledRegister,
    Message,
    PendingResult,
    StepOrder,
    Stop,
    ThreadId,
    Values,
    WorkerReport,
    value_of,
)
from sbp_actor_runtime.post import ActorFiring, Post, make_posts
from sbp_actor_runtime.register import InRegister, OutRegister
from sbp_actor_runtime.work import Receiving
from sbp_core.boxing import Communicator
from sbp_core.compile import (
    COMMIT,
    FETCH_THREAD,
    STORE_THREAD,
    Collective,
    PhysicalPlan,
    Receive,
    early_receives,
)
from sbp_core.errors import RunError
from sbp_core.runtime import Span, SpanKind
from sbp_torch.runtime import RankDevice, not_finite, overwrite, undo_limits
from sbp_torch.segments import SegmentMaker

logger = logging.getLogger(__name__)

#: Number of deadlines that a thread waits for another thread of its process. A thread that waits
#: for another process fails first, then, and its error names the rank.
PATIENCE = 2.0


class Stopped(Exception):  # noqa: N818 (no error: another thread's failure ends this one)
    """The session asked the thread to stop in the middle of a step."""


class LastBoxing(NamedTuple):
    """Time of an actor's last boxing, by `time.monotonic`; `ended_s` is None while it lasts.

    `step` counts from 0 in the session.
    """

    step: int
    micro_batch: int
    began_s: float
    ended_s: float | None = None


class ActorThread:
    """The loop of one thread, and the posts of its actors.

    Args:
        plan: A plan with firing orders.
        thread: The thread of the plan.
        ranks_here: Ranks of this process.
        communicator: The communicator of its rank.
        post: Puts a message into the inbox of another thread.
        report: Gives the session the report of a step.
        num_threads: Threads that one operator may use.
        turn: See `work_of`.
        device: The device of the rank.
        make_segment: Makes the functions of segments; None for generated Python.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        thread: ThreadId,
        ranks_here: Collection[int],
        communicator: Communicator,
        post: Callable[[ThreadId, Message], None],
        report: Callable[[WorkerReport], None],
        num_threads: int,
        turn: threading.Lock,
        device: RankDevice,
        make_segment: SegmentMaker | None = None,
    ) -> None:
        self.id, self.device = thread, device
        #: One thread of a rank uses the communicator; the threads that copy to the host do not.
        self.moves_messages = thread[1] not in (FETCH_THREAD, STORE_THREAD)
        self.post, self.report, self.num_threads = post, report, num_threads
        self.communicator = communicator
        #: Pending results of boxing that nobody has waited for -> the actor.
        self.open: dict[PendingResult, str] = {}
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        #: The last boxing of each boxing actor.
        self.boxed: dict[str, LastBoxing] = {}
        #: The actor that is firing or about to; for messages about threads that hang.
        self.current_actor = ""
        #: The place of that actor in the order; -1 before the first.
        self.place = -1
        #: Whether the thread waits for inputs or credits of that actor.
        self.is_waiting = False
        self.is_stopping = False
        #: Whether it is past the commit of a step that overwrites states, here or on other ranks;
        #: the session resets it before each step.
        self.has_overwritten = False
        posts = make_posts(plan, thread, communicator, ranks_here, turn, make_segment)
        self.order: list[tuple[Post, ActorFiring]] = [
            (posts[name], posts[name].firing(index))
            for name, index in plan.by_rank[thread[0]].orders[thread[1]]
        ]
        #: Place in the order -> receives whose messages are asked for before that firing.
        self.early = early_receives(plan.by_rank[thread[0]], thread[1])
        #: Number of firings before the first one that overwrites a state.
        self.last_moment = undo_limits(plan)[thread]
        self.overwrites = any(actor.in_place for part in plan.ranks for actor in part.actors)
        self.inputs: dict[tuple[str, str], InRegister] = {
            (name, register.name): register
            for name, post in posts.items()
            for register in post.inputs
        }
        self.outputs: dict[str, OutRegister] = {
            end.name: end for post in posts.values() for end in (*post.outputs, *post.sends)
        }
        self.os_thread = threading.Thread(
            target=self._loop, name=f"sbp rank {thread[0]} {thread[1]}", daemon=True
        )

    def stop(self) -> None:
        """End the thread: at once if it waits for a message, else after the current firing."""
        self.is_stopping = True
        self.inbox.put(Stop())

    # The loop.

    def _loop(self) -> None:
        # The number of threads and the current device are settings of each thread.
        torch.set_num_threads(self.num_threads)
        self.device.enter()
        while self._next_message():
            pass

    def _next_message(self) -> bool:
        """Handle one message; return whether to go on."""
        # A separate frame drops the message, so that states and batches do not live between steps.
        message = self.inbox.get()
        if isinstance(message, StepOrder):
            # Every ordered step is reported, even if it may not begin: the session waits for it.
            self.report(self._step(message))
            return not self.is_stopping
        if isinstance(message, Stop):
            return False
        self._handle(message)
        return True

    def _step(self, order: StepOrder) -> WorkerReport:
        report = WorkerReport(self.id)
        try:
            with torch.no_grad(), order.watch(self.id[0]):
                self._run(0, self.last_moment, order, report)
                if order.only_finite:
                    self._end_begun(report)
                if order.only_finite and not_finite(report.results):
                    report.has_refused = self.last_moment < len(self.order)
                    return report
                if self.overwrites and self.last_moment < len(self.order):
                    self._begin_update(order)
                self._run(self.last_moment, len(self.order), order, report)
                self._end_begun(report)
            self.current_actor = ""
        except Stopped as stopped:
            report.error, report.actor, report.stopped = stopped, self.current_actor, True
        except BaseException as error:
            logger.debug("rank %s failed in %s", self.id[0], self.current_actor, exc_info=True)
            report.error, report.actor = error, self.current_actor
        self.open.clear()
        return report

    def _run(self, start: int, stop: int, order: StepOrder, report: WorkerReport) -> None:
        """Fire the actors at places `start` to `stop` (excluded) in the order."""
        fire = self._fire if order.trace is None else self._fire_traced
        for place in range(start, stop):
            self.place = place
            for early in self.early.get(place, ()):
                # If the step may end at `stop`, ask for no message of a later firing.
                if early < stop or not order.only_finite:
                    self._ask(early, order)
            post, firing = self.order[place]
            self.current_actor = post.actor.name
            fire(post, firing, order, report)

    def _ask(self, place: int, order: StepOrder) -> None:
        """Ask for the message that the firing at a place in the order receives."""
        post, firing = self.order[place]
        self.current_actor = post.actor.name
        assert isinstance(post.work, Receiving), "only receives are early"
        post.work.ask(firing.number, order)

    def _fire_traced(
        self, post: Post, firing: ActorFiring, order: StepOrder, report: WorkerReport
    ) -> Values:
        """Call `_fire`, and record its time and its waits in the trace."""
        trace = order.trace
        assert trace is not None, "the step is traced"
        whose = (*self.id, order.index, post.actor.name, firing.number)
        began = trace.now_ns()
        if not post.may_fire(firing):
            missing = post.describe_missing(firing)
            self._wait(post, firing, order.deadline_s)
            blocked, began = began, trace.now_ns()
            trace.note(Span(SpanKind.BLOCKED, *whose, blocked, began, missing))
        under_way = [self.open[one] for one in self._open_inputs(post, firing)]
        if under_way:
            self._await(self._open_inputs(post, firing))
            blocked, began = began, trace.now_ns()
            missing = f"the end of {', '.join(under_way)}"
            trace.note(Span(SpanKind.BLOCKED, *whose, blocked, began, missing))
        made = self._fire(post, firing, order, report)
        trace.note(Span(SpanKind.FIRING, *whose, began, trace.now_ns()))
        is_boxed = isinstance(post.actor, Collective | Receive)
        taken = [value for value in made.values() if not isinstance(value, PendingResult)]
        trace.count(self.id[0], taken, handed=is_boxed)
        return made

    def _fire(
        self, post: Post, firing: ActorFiring, order: StepOrder, report: WorkerReport
    ) -> Values:
        if self.is_stopping:
            raise Stopped
        if not post.may_fire(firing):
            self._wait(post, firing, order.deadline_s)
        if self.moves_messages:
            self.communicator.progress()
        if self.open:
            self._await(self._open_inputs(post, firing))
        if post.actor.name == COMMIT and not order.commitment.try_commit():
            raise Stopped
        if post.actor.in_place:
            self._begin_update(order)
        taken = self._take(post, firing.number, order)
        if post.is_boxing:
            made = self._box(post, firing, taken, order)
        else:
            made = post.work(firing.number, taken, order)
        for end in post.sends:
            end.fill()
        for register in firing.fills:
            self._fill(register, made, firing)
        for name, key in post.actor.emits if made else ():
            report.results[name] = made[key]
        for name, key in post.actor.writes if made else ():
            if name in post.actor.in_place:
                if order.before_overwrite is not None:
                    order.before_overwrite(name)
                overwrite(order.states[name], value_of(made[key]))
            else:
                report.new_states[name] = made[key]
        for read in post.inputs:
            if read.is_last_use(firing.number):
                self._send(read.producer, Acknowledge(read.name, post.actor.name))
        for link, sender in post.receives:
            self._send(sender, Acknowledge(link, post.actor.name))
        return made

    def _begin_update(self, order: StepOrder) -> None:
        """Note that a state is overwritten from now on.

        Raises:
            Stopped: the session asked the thread to stop, or the step was aborted; nothing is
                overwritten.
        """
        if not order.commitment.try_commit():
            raise Stopped
        # First set the flag, then look for a stop. So if the session has stopped the thread and
        # then finds the flag unset, it knows that the thread will not write.
        before, self.has_overwritten = self.has_overwritten, True
        if self.is_stopping:
            self.has_overwritten = before
            raise Stopped

    def _box(self, post: Post, firing: ActorFiring, taken: Values, order: StepOrder) -> Values:
        """Run the work of a boxing actor, and note its time."""
        began_s, name = time.monotonic(), post.actor.name
        self.boxed[name] = LastBoxing(order.index, firing.number, began_s)
        made = post.work(firing.number, taken, order)
        if post.actor.overlaps:
            self._begin(post, made)
        else:
            self.boxed[name] = LastBoxing(order.index, firing.number, began_s, time.monotonic())
        return made

    def _begin(self, post: Post, made: Values) -> None:
        """Note the pending results that boxing has begun."""
        self.open |= dict.fromkeys(made.values(), post.actor.name)
        if any(t != self.id for end in post.outputs for _, t in end.consumers):
            self._await(list(made.values()))  # a communicator is used by one thread

    def _open_inputs(self, post: Post, firing: ActorFiring) -> list[PendingResult]:
        """Return the inputs of an actor that are still in flight."""
        return [one for end in post.inputs for one in end.open(firing.number)]

    def _await(self, begun: Iterable[PendingResult]) -> None:
        """Wait for some pending results of boxing."""
        for one in begun:
            one.wait()
            name = self.open.pop(one, None)
            if name is not None:
                self.boxed[name] = self.boxed[name]._replace(ended_s=time.monotonic())

    def _end_begun(self, report: WorkerReport) -> None:
        """Wait for all pending results, such as results of the step, which no actor waits for."""
        self._await(list(self.open))
        report.results = {name: value_of(value) for name, value in report.results.items()}
        report.new_states = {name: value_of(value) for name, value in report.new_states.items()}

    def _take(self, post: Post, index: int, order: StepOrder) -> Values:
        """Return the inputs of an actor by key: from registers, states, the batch and scalars."""
        values: Values = {}
        for register in post.inputs:
            values |= register.take(index)
        for key in post.actor.reads:
            if key not in values:  # else it comes from the previous micro-batch
                values[key] = order.states[key] if key in order.states else order.fed[index][key]
        return values

    def _fill(self, register: OutRegister, made: Values, firing: ActorFiring) -> None:
        register.fill()
        if not register.is_taken_of(firing.number):
            return  # nobody reads it in this step; the next one begins with the newest states
        values = {key: made[key] for key in register.keys}
        if not register.keys:
            # A token means that its producer has finished, so a reader of a boxing token waits for
            # it.
            values = {key: made[key] for key in made if isinstance(made[key], PendingResult)}
        for consumer, thread in register.consumers:
            self._send(thread, FilledRegister(register.name, consumer, values))

    # Messages.

    def _wait(self, post: Post, firing: ActorFiring, deadline_s: float) -> None:
        """Handle messages until the actor may fire.

        Raises:
            RunError: no message came for `PATIENCE` deadlines; its text names what is missing.
            Stopped: the session asked the thread to stop.
        """
        self.is_waiting = True
        while not post.may_fire(firing):
            try:
                message = self.inbox.get(timeout=PATIENCE * deadline_s)
            except Empty:
                raise RunError(
                    f"{post.actor.name} has waited {PATIENCE * deadline_s:g} s for "
                    f"{post.describe_missing(firing)}",
                    where=f"rank {self.id[0]}, thread {self.id[1]}",
                    todo="find the rank that stopped; raise runtime.deadline_s if it is only slow",
                ) from None
            self._handle(message)
        self.is_waiting = False

    def _handle(self, message: Message) -> None:
        if isinstance(message, FilledRegister):
            self.inputs[(message.consumer, message.register)].fillings.append(message.values)
        elif isinstance(message, Acknowledge):
            self.outputs[message.register].acknowledge(message.consumer)
        else:
            assert isinstance(message, Stop), "a step is ordered when the last one is reported"
            raise Stopped

    def _send(self, thread: ThreadId, message: FilledRegister | Acknowledge) -> None:
        """Deliver a message: by a call on this thread, else through the other's inbox."""
        if thread == self.id:
            self._handle(message)
        else:
            self.post(thread, message)
