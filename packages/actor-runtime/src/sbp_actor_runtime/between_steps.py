"""Gather a sharded state from all ranks between two steps, or check that a text is equal on all.

`ActorSession` uses it for `state_dict`, and to compare the plans of all processes. Each local rank
calls its communicator on a separate thread, as in a step, because the ranks of one process wait for
each other, too. The workers of the session are idle meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from sbp_core.boxing import BoxingBackend, BoxingStep, StepKind
from sbp_core.compile import PhysicalPlan
from sbp_core.runtime import gather_routes
from sbp_torch.boxing import local_step
from sbp_torch.boxing.processes import agree
from sbp_torch.runtime import StateStore


class BetweenSteps:
    """Calls of all ranks of a run between two steps; every process has to make the same calls.

    Args:
        plan: The plan of the session.
        store: The states of the local ranks.
        backend: The opened boxing backend.
        deadline_s: Seconds that one call may wait for other ranks.
    """

    def __init__(
        self, plan: PhysicalPlan, store: StateStore, backend: BoxingBackend, deadline_s: float
    ) -> None:
        self.plan, self.store, self.backend = plan, store, backend
        self.deadline_s = deadline_s

    def agree(self, what: str, value: str, deadline_s: float | None = None) -> None:
        """Check that a text is the same in every process.

        Args:
            what: Name of the text; the same in all processes.
            value: The text.
            deadline_s: Seconds to wait for other ranks; the deadline of the session if None.

        Raises:
            BoxingError: the texts differ, or a rank did not take part.
        """
        everyone = [part.rank for part in self.plan.ranks]
        limit_s = self.deadline_s if deadline_s is None else deadline_s

        def compare(rank: int) -> None:
            agree(self.backend.communicator(rank), everyone, what, value, limit_s)

        self._on_each_rank(compare)

    def gather(self, name: str, to: int | None) -> Tensor | None:
        """Return a whole state in the process of rank `to`, or in all; elsewhere None.

        It is a copy on the CPU.

        Raises:
            SbpLookupError: there is no such state or rank.
            BoxingError: a rank did not take part.
        """
        routes = gather_routes(self.plan, name, to)
        wants = set(self.store.values) if to is None else {to} & set(self.store.values)
        number = self.store.number(name)
        if number is not None:
            return number if wants else None
        found: dict[int, Tensor | None] = {}

        def take_part(rank: int) -> None:
            value = self.store.values[rank].get(name)
            assert value is None or isinstance(value, Tensor), "no host number"
            if value is not None and self.store.layout.slots[name].offloaded:
                value = self.store.device.put(value)  # transports read from there
            for index, steps in enumerate(routes):
                value = self._pass(rank, steps, value, f"gather {name!r}, route {index}")
            found[rank] = value

        if routes:
            self._on_each_rank(take_part)
        else:
            for rank in wants:  # these ranks store the whole state already
                take_part(rank)
        # A result may be the rank's own shard, or shared with other ranks of this process.
        whole = next((found[rank] for rank in wants), None)
        return None if whole is None else self.store.device.fetch(whole.clone())

    def _pass(
        self, rank: int, steps: Sequence[BoxingStep], value: Tensor | None, tag: str
    ) -> Tensor | None:
        """Take part in a route; return the rank's result (see `gather_routes`)."""
        communicator, limit_s = self.backend.communicator(rank), self.deadline_s
        here: Any = value
        for index, step in enumerate(steps):
            call = f"{tag}, step {index}"
            sends, takes = rank in step.source[0], rank in step.target[0]
            if step.kind is StepKind.TRANSFER:
                if sends:
                    communicator.send(step, here, tag=call, deadline_s=limit_s)
                if takes:
                    own = here if sends else None
                    here = communicator.receive(step, own, tag=call, deadline_s=limit_s)
            elif sends:
                if step.kind is StepKind.LOCAL:
                    here = local_step(step, rank, here)
                else:
                    here = communicator.collective(step, here, tag=call, deadline_s=limit_s)
        return here if rank in steps[-1].target[0] else value

    def _on_each_rank(self, call: Callable[[int], None]) -> None:
        """Call a function for every local rank at the same time; raise its first error."""
        outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

        def run(rank: int) -> None:
            try:
                self.store.device.enter()  # the current device is set for each thread
                call(rank)
            except BaseException as error:
                outcomes.put(error)
            else:
                outcomes.put(None)

        # Also because of Ctrl-C: on threads, it need not wait for other ranks.
        for rank in self.store.values:
            threading.Thread(target=run, args=(rank,), name="sbp between", daemon=True).start()
        for _ in self.store.values:
            if (error := outcomes.get()) is not None:
                raise error
