"""Make the function that an actor calls when it fires: a generated segment, a sum, a boxing step.

An actor is one task of a rank in a plan; a boxing step moves or reshards a tensor. The function
maps input values to output values; the registers (buffers) around it are in `post`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from math import inf
from typing import Any

from sbp_actor_runtime.message import PendingResult, StepOrder, Values
from sbp_core.boxing import Communicator, Delivery, Pending
from sbp_core.compile import (
    FETCH_THREAD,
    STORE_THREAD,
    Accumulate,
    Actor,
    BoxingActor,
    Collective,
    Compute,
    PhysicalPlan,
    Receive,
    Send,
    first_overwrites,
    keys_out,
)
from sbp_core.runtime import Span, SpanKind, Trace
from sbp_torch.runtime import Accumulation
from sbp_torch.segments import (
    OwningSegment,
    SegmentMaker,
    TellingSegment,
    TimedSegment,
    operator_clock,
    segment_function,
    telling_segment_function,
    timed_segment_function,
)

#: (index of the micro-batch, values taken, order of the step) -> values made.
Work = Callable[[int, Values, StepOrder], Values]

#: Average seconds below which operators are short: waking another thread at each of them costs more
#: than a second core gains.
SHORT_S = 3e-5

#: Number of runs to find out whether a segment is short; the first one also warms up.
_TRIALS = 3

#: Seconds that a segment waits for its turn; then it runs concurrently with other segments.
_LONGEST_WAIT_S = 0.1


def work_of(
    actor: Actor,
    plan: PhysicalPlan,
    communicator: Communicator,
    turn: threading.Lock,
    make_segment: SegmentMaker | None = None,
) -> Work:
    """Return the function of an actor of the communicator's rank.

    Args:
        actor: The actor.
        plan: The plan that contains it.
        communicator: The communicator of its rank.
        turn: Lock that a segment of short operators holds while it runs; one for all ranks of a
            session.
        make_segment: Makes the functions of segments; None for generated Python.
    """
    if isinstance(actor, Compute):
        run = _segment(actor, plan, communicator.rank, make_segment)
        # Segments of Inductor and CUDA graphs start few operators. Copies to and from the host wait
        # for the device, concurrently with other segments.
        if make_segment or actor.thread in (FETCH_THREAD, STORE_THREAD):
            return run
        return in_turn(run, _num_operators(actor), turn, (communicator.rank, actor))
    if isinstance(actor, Accumulate):
        return _accumulation(actor, plan)
    if isinstance(actor, Send):
        return _send(actor, plan, communicator)
    if isinstance(actor, Receive):
        return Receiving(actor, plan, communicator)
    return _collective(actor, plan, communicator)


def _segment(
    actor: Compute, plan: PhysicalPlan, rank: int, make_segment: SegmentMaker | None
) -> Work:
    make = make_segment or partial(segment_function, owns=True)
    function = make(actor, rank, plan.steps)
    taken = (*actor.inputs, *actor.reads)
    made = keys_out(actor)

    @cache
    def telling() -> TellingSegment:
        if make_segment is None:
            return telling_segment_function(actor, rank, plan.steps)
        return _telling_all(actor, function)

    @cache
    def timed() -> TimedSegment:
        return timed_segment_function(actor, rank, plan.steps)

    def run_timed(index: int, given: list[Any], order: StepOrder, trace: Trace) -> tuple[Any, ...]:
        values, times_ns = timed()(given, operator_clock(given))
        whose = (rank, actor.thread, order.index, actor.name, index)
        for entry, (began, ended) in zip(actor.instructions, pairwise(times_ns), strict=True):
            trace.note(Span(SpanKind.OPERATOR, *whose, began, ended, node=entry.node))
        return values

    def run(index: int, values: Values, order: StepOrder) -> Values:
        # The list gives up ownership, so that the segment can free a value after its last use.
        given = [values.pop(key) for key in taken]
        trace = order.trace
        if order.before_overwrite is None or not actor.in_place:
            if trace is not None and trace.operators and make_segment is None:
                return dict(zip(made, run_timed(index, given, order, trace), strict=True))
            return dict(zip(made, function(given), strict=True))
        return dict(zip(made, telling()(given, order.before_overwrite), strict=True))

    return run


def _telling_all(actor: Compute, function: OwningSegment) -> TellingSegment:
    """Return a segment that reports all states that it overwrites before it begins."""

    def run(given: list[Any], before_overwrite: Callable[[str], None]) -> tuple[Any, ...]:
        for states in first_overwrites(actor).values():
            for state in states:
                before_overwrite(state)
        return function(given)

    return run


def in_turn(
    run: Work, num_operators: int, turn: threading.Lock, whose: tuple[int, Compute]
) -> Work:
    """Return the work of a segment that waits for its turn while its operators are short.

    An operator releases Python's interpreter lock while it computes, and takes it again. If
    operators take microseconds only, threads that compute at the same time pass the lock to and fro
    and wake each other each time, which takes longer than the operators.

        both at once   a1 | wake | b1 | wake | a2 | wake | b2 ...
        in turn        a1 a2 a3 ... | wake | b1 b2 b3 ...

    Args:
        run: Runs the segment.
        num_operators: Number of operators of the segment.
        turn: Lock that is held while a segment runs in turn.
        whose: Rank and actor, for a trace.
    """
    fastest_s, num_trials = inf, 0

    def run_in_turn(index: int, values: Values, order: StepOrder) -> Values:
        nonlocal fastest_s, num_trials
        if num_trials >= _TRIALS and fastest_s >= SHORT_S * num_operators:
            return run(index, values, order)
        # A thread that holds the lock longer may hang, or wait for another rank. The other threads
        # continue then, and the errors of their deadlines name the thread that hangs.
        asked_ns = Trace.now_ns()
        has_turn = turn.acquire(timeout=_LONGEST_WAIT_S)
        if order.trace is not None:
            order.trace.note(_turn_span(whose, index, order.index, asked_ns))
        if not has_turn:
            return run(index, values, order)
        try:
            began = time.perf_counter()
            made = run(index, values, order)
            fastest_s = min(fastest_s, time.perf_counter() - began)
            num_trials += 1
        finally:
            turn.release()
        return made

    return run_in_turn


def _turn_span(whose: tuple[int, Compute], index: int, step: int, asked_ns: int) -> Span:
    """Return the span, ending now, during which a segment waited for its turn."""
    rank, actor = whose
    what = "the interpreter: another rank of the process computes"
    names = (rank, actor.thread, step, actor.name, index)
    return Span(SpanKind.TURN, *names, asked_ns, Trace.now_ns(), what)


def _num_operators(actor: Compute) -> int:
    """Return the number of PyTorch operators that a segment starts, without host arithmetic."""
    return sum(not entry.op.startswith("host.") for entry in actor.instructions)


def _accumulation(actor: Accumulate, plan: PhysicalPlan) -> Work:
    sums = Accumulation(actor, plan.repetitions[actor.rate] // plan.repetitions[actor.fills])

    def run(index: int, values: Values, order: StepOrder) -> Values:
        return dict(sums.add(index, values))

    return run


def _tag(actor: BoxingActor) -> Callable[[int, StepOrder], str]:
    """Return a function that names a firing, with one name on all ranks that take part."""
    name = actor.name if isinstance(actor, Collective) else actor.message
    return lambda index, order: f"{name}, micro-batch {index} of step {order.index}"


def _send(actor: Send, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)
    actor_id = (communicator.rank, actor.name)
    # A send that sends nothing has no link, and never waits.
    quota = min((link.quota for link in plan.links if link.sender == actor_id), default=1)
    #: Messages that were sent and are not known to be received: at most `quota`.
    under_way: deque[Delivery] = deque()

    def run(index: int, values: Values, order: StepOrder) -> Values:
        (shard,) = values.values()
        # Credit. In the token game (the compiler's replay that proves the plan free of deadlock), a
        # send waits until its receivers have finished with the message that is `quota` older. Here
        # it waits until they have asked for it, which is not later. So no wait is longer than
        # there.
        while len(under_way) >= quota:
            under_way.popleft().wait()
        name, deadline_s = tag(index, order), order.deadline_s
        under_way.append(communicator.send(step, shard, tag=name, deadline_s=deadline_s))
        return {}

    return run


class Receiving:
    """The work of a receive, whose message may be asked for some time before it fires."""

    def __init__(self, actor: Receive, plan: PhysicalPlan, communicator: Communicator) -> None:
        self._step, self._makes, self._tag = plan.steps[actor.step], actor.makes, _tag(actor)
        self._communicator = communicator
        #: Pending requests by index of the micro-batch.
        self._asked: dict[int, Pending] = {}

    def ask(self, index: int, order: StepOrder) -> None:
        """Ask for the message of a firing that needs no value of its own rank."""
        self._asked[index] = self._begin(index, None, order)

    def __call__(self, index: int, values: Values, order: StepOrder) -> Values:
        """See `Work`."""
        pending = self._asked.pop(index, None)
        if pending is None:
            pending = self._begin(index, next(iter(values.values()), None), order)
        return {self._makes: pending.wait()}

    def _begin(self, index: int, own: Any, order: StepOrder) -> Pending:
        tag, deadline_s = self._tag(index, order), order.deadline_s
        return self._communicator.begin_receive(self._step, own, tag=tag, deadline_s=deadline_s)


def _collective(actor: Collective, plan: PhysicalPlan, communicator: Communicator) -> Work:
    step, tag = plan.steps[actor.step], _tag(actor)

    def run(index: int, values: Values, order: StepOrder) -> Values:
        (shard,) = values.values()
        name, deadline_s = tag(index, order), order.deadline_s
        if actor.overlaps:
            pending = communicator.begin(step, shard, tag=name, deadline_s=deadline_s)
            return {actor.makes: PendingResult(pending, shard)}
        return {actor.makes: communicator.collective(step, shard, tag=name, deadline_s=deadline_s)}

    return run
