"""One thread of one rank: fires its actors in the plan's order, as data and credits allow.

Messages between threads are two: a request hands a filled register to a consumer, an
acknowledgement gives the credit back. Within a thread both are plain calls. A worker never looks at
another worker's state; what it needs arrives in its inbox.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sbp_actor_runtime.register import InRegister, OutRegister, Values
from sbp_core.boxing.backend import Communicator
from sbp_core.compile.physical import Actor, ActorKind, Link, PhysicalPlan
from sbp_core.errors import RunError
from sbp_core.graph.ir import Rate
from sbp_core.runtime.codegen import Segment, keys_out, segment_function

logger = logging.getLogger(__name__)

ThreadId = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Request:
    """A register was filled: its values, for one consumer."""

    register: str
    consumer: str
    values: Values


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """A consumer is through with the oldest filling of a register or link."""

    register: str
    consumer: str


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Run one step: what to read of states, batches and scalars, by micro-batch."""

    index: int
    states: Mapping[str, Any]
    fed: list[Values]
    deadline_s: float


class Stop:
    """End the thread."""


@dataclass(slots=True)
class WorkerReport:
    """What a worker's step gave: results, new states, or the failure."""

    thread: ThreadId
    results: dict[str, Tensor] = field(default_factory=dict)
    new_states: Values = field(default_factory=dict)
    error: BaseException | None = None
    actor: str = ""


Message = Request | Acknowledge | StepOrder | Stop


class Worker:
    """The state of one thread's actors, and its loop."""

    def __init__(
        self,
        plan: PhysicalPlan,
        thread: ThreadId,
        communicator: Communicator,
        post: Callable[[ThreadId, Message], None],
        report: Callable[[WorkerReport], None],
        num_threads: int,
    ) -> None:
        self.plan, self.id = plan, thread
        self.part = plan.by_rank[thread[0]]
        self.order = self.part.orders[thread[1]]
        self.communicator, self.post, self.report = communicator, post, report
        self.num_threads = num_threads
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.inputs: dict[str, dict[str, InRegister]] = {}
        self.outputs: dict[str, OutRegister] = {}
        self.sends: dict[str, list[OutRegister]] = defaultdict(list)
        self.receives: dict[str, list[Link]] = defaultdict(list)
        self.functions: dict[str, Segment] = {}
        self.sums: dict[str, Tensor] = {}
        self.thread_of = {actor.name: (thread[0], actor.thread) for actor in self.part.actors}
        self._connect()
        rank, name = thread
        self.os_thread = threading.Thread(
            target=self._loop, name=f"sbp rank {rank} {name}", daemon=True
        )

    def _connect(self) -> None:
        """Make the ends of every register and link that this thread touches."""
        rank = self.id[0]
        mine = {name for name, _ in self.order}
        for name in mine:
            self.inputs[name] = {r.name: InRegister(r.name) for r in self.part.inputs_of[name]}
            for register in self.part.outputs_of[name]:
                self.outputs[register.name] = OutRegister(
                    register.name, register.quota, register.consumers
                )
            actor = self.part.by_name[name]
            if actor.kind is ActorKind.COMPUTE:
                self.functions[name] = segment_function(actor, rank, self.plan.steps)
        for link in self.plan.links:
            if link.sender[0] == rank and link.sender[1] in mine:
                end = OutRegister(link.name, link.quota, [link.name])
                self.outputs[link.name] = end
                self.sends[link.sender[1]].append(end)
            if link.receiver[0] == rank and link.receiver[1] in mine:
                self.receives[link.receiver[1]].append(link)

    # The loop.

    def _loop(self) -> None:
        torch.set_num_threads(self.num_threads)
        while True:
            message = self.inbox.get()
            if isinstance(message, Stop):
                return
            if isinstance(message, StepOrder):
                self.report(self._step(message))
            else:
                self._handle(message)

    def _step(self, order: StepOrder) -> WorkerReport:
        report = WorkerReport(self.id)
        try:
            with torch.no_grad():
                for name, index in self.order:
                    report.actor = name
                    self._fire(self.part.by_name[name], index, order, report)
        except BaseException as error:
            logger.debug("rank %s failed in %s", self.id[0], report.actor, exc_info=True)
            report.error = error
        return report

    def _handle(self, message: Message) -> None:
        if isinstance(message, Request):
            self.inputs[message.consumer][message.register].fillings.append(message.values)
        elif isinstance(message, Acknowledge):
            self.outputs[message.register].acknowledged[message.consumer] += 1
        elif isinstance(message, Stop):
            raise RunError(f"rank {self.id[0]} was stopped in the middle of a step")

    def _wait(self, name: str, lack: Callable[[], str], deadline_s: float) -> None:
        """Handle messages until nothing is lacking.

        Raises:
            RunError: nothing came for `deadline_s` seconds; says what was lacking.
        """
        while lacking := lack():
            try:
                self._handle(self.inbox.get(timeout=deadline_s))
            except Empty:
                raise RunError(
                    f"{name} has waited {deadline_s:.0f} s for {lacking}",
                    where=f"rank {self.id[0]}, thread {self.id[1]}",
                    todo="see which rank stopped; raise runtime.deadline_s if it is only slow",
                ) from None

    # One firing.

    def _fire(self, actor: Actor, index: int, order: StepOrder, report: WorkerReport) -> None:
        inputs = self.inputs[actor.name]
        outputs = [
            self.outputs[r.name]
            for r in self.part.outputs_of[actor.name]
            if r.rate is Rate.MICRO or actor.rate is Rate.STEP or self._is_last(index)
        ]

        def lack() -> str:
            for register in inputs.values():
                if not register.fillings:
                    return f"data in register {register.name}"
            for out in (*outputs, *self.sends[actor.name]):
                if not out.has_credit:
                    return f"credit of {out.name} from {out.slowest()}"
            return ""

        self._wait(actor.name, lack, order.deadline_s)
        values: Values = {}
        for register in inputs.values():
            values |= register.fillings.popleft()
        for key in actor.reads:
            values[key] = order.states[key] if key in order.states else order.fed[index][key]
        made = self._work(actor, index, values, order)
        self._give(actor, made, report)
        for name in inputs:
            self._acknowledge(name, actor.name)

    def _is_last(self, index: int) -> bool:
        return index == self.plan.num_micro_batches - 1

    def _work(self, actor: Actor, index: int, values: Values, order: StepOrder) -> Values:
        """Do the work of one firing; return the keys it made."""
        if actor.kind is ActorKind.COMPUTE:
            arguments = [values.pop(key) for key in (*actor.inputs, *actor.reads)]
            made = self.functions[actor.name](*arguments)
            return dict(zip(keys_out(actor), made, strict=True))
        if actor.kind is ActorKind.ACCUMULATE:
            return self._accumulate(actor, index, values)
        step = self.plan.steps[actor.step]
        key = actor.name.removeprefix("send ").removeprefix("receive ")
        tag = f"{key}, micro-batch {index} of step {order.index}"
        if actor.kind is ActorKind.SEND:
            (shard,) = values.values()
            for end in self.sends[actor.name]:
                end.filled += 1
            self.communicator.send(step, shard, tag=tag, deadline_s=order.deadline_s)
            return {}
        if actor.kind is ActorKind.RECEIVE:
            own = next(iter(values.values()), None)
            part = self.communicator.receive(step, own, tag=tag, deadline_s=order.deadline_s)
            for link in self.receives[actor.name]:
                sender = (link.sender[0], self._thread_of_link(link))
                self._send(sender, Acknowledge(link.name, link.name))
            return {actor.makes: part}
        (shard,) = values.values()
        return {
            actor.makes: self.communicator.collective(
                step, shard, tag=tag, deadline_s=order.deadline_s
            )
        }

    def _thread_of_link(self, link: Link) -> str:
        rank, name = link.sender
        return self.plan.by_rank[rank].by_name[name].thread

    def _accumulate(self, actor: Actor, index: int, values: Values) -> Values:
        for part, total, scale in actor.accumulates:
            scaled = values[part] * scale
            self.sums[total] = self.sums[total] + scaled if index else scaled
        if not self._is_last(index):
            return {}
        return {total: self.sums.pop(total) for _, total, _ in actor.accumulates}

    def _give(self, actor: Actor, made: Values, report: WorkerReport) -> None:
        """Fill registers with what was made; keep results and new states."""
        if not made:
            return
        for register in self.part.outputs_of[actor.name]:
            values = {key: made[key] for key in register.keys}
            self.outputs[register.name].filled += 1
            for consumer in register.consumers:
                request = Request(register.name, consumer, dict(values))
                self._send(self.thread_of[consumer], request)
        for name, key in actor.emits:
            report.results[name] = made[key]
        for name, key in actor.writes:
            report.new_states[name] = made[key]

    def _acknowledge(self, register: str, consumer: str) -> None:
        producer = self.part.producer_of[register]
        self._send(self.thread_of[producer], Acknowledge(register, consumer))

    def _send(self, thread: ThreadId, message: Request | Acknowledge) -> None:
        """Deliver a message: by a call on this thread, else through the other's inbox."""
        if thread == self.id:
            self._handle(message)
        else:
            self.post(thread, message)
