"""The search for problems that the integer program alone does not solve at once.

    messages and prices <──> large neighbourhoods        this process: assignments, bounds
                 │ prune what costs more than some cost c
                 v
    reduce further ──> integer program                   a second process: proofs

What is pruned is in no assignment that costs at most c. If the best of the program that is left
costs at most c, it is the best of all; if not, all cost more than c, which is a bound. So c
may lie below the best cost known: the farther, the smaller the program. The largest c with a
program of a size that was solved in time before is taken; each one solved raises the bound or finds
something better, so that the next is nearer to the best cost, where it is the proof.
"""

from __future__ import annotations

import logging
import time
from math import inf

import numpy as np

from sbp_planner.choice.dual import DualAscent
from sbp_planner.choice.graph import NothingAllowedError
from sbp_planner.choice.neighbourhood import Neighbourhoods
from sbp_planner.choice.problem import Ints
from sbp_planner.choice.program import ProgramResult
from sbp_planner.choice.record import Mask, Part, Record
from sbp_planner.choice.worker import Bound, Task, Values, Worker

_log = logging.getLogger(__name__)

#: Allowed pairs that the second process is given at first, at least, and at most.
_PAIRS = 40_000.0
_FEWEST_PAIRS = 4_000.0
_MOST_PAIRS = 400_000.0

#: Part of the time that is left that one program may take, and least seconds.
_PROGRAM_PART = 0.25
_PROGRAM_S = 15.0

#: A program for the proof takes the place of one that is so much larger.
_MUCH_SMALLER = 0.6

#: Sweeps of messages between two looks at what can be pruned, and at the time; sweeps after prices
#: moved, for the messages to follow.
_SWEEPS = 20
_SETTLING_SWEEPS = 3

#: Part of the time that messages may have alone.
_MESSAGES_PART = 0.15


class Search:
    """Messages and neighbourhoods here, the integer program in a second process."""

    def __init__(self, record: Record, part: Part, begin: Ints | None) -> None:
        self.record = record
        self.part = part
        self.dual = DualAscent(part.compact)
        self.near = Neighbourhoods(part.compact, self.dual.sweep() if begin is None else begin)
        self.pairs = _PAIRS
        self.worker: Worker | None = None
        self.worker_part: Part | None = None
        self.worker_below = inf

    def run(self) -> None:
        """Search until the best is proved or the time is up."""
        try:
            messages_until = self.record.after(_MESSAGES_PART)
            while not self.record.done:
                before = self.record.cost - self.dual.bound
                began = time.monotonic()
                self._pass_messages()
                self._consider_worker()
                self._listen()
                stalled = self.record.cost - self.dual.bound > 0.98 * before < inf
                if stalled or time.monotonic() > messages_until:
                    self._search_near(2 * time.monotonic() - began)
        finally:
            if self.worker is not None:
                self.worker.end()

    def _search_near(self, until: float) -> None:
        """Search large neighbourhoods, one or more."""
        while not self.record.done:
            self.near.step(self.record.deadline)
            self.part.offer(self.near.values)
            self._listen()
            if time.monotonic() >= until:
                return

    def _pass_messages(self) -> None:
        for _ in range(_SWEEPS):
            if self.record.done:
                return
            values = self.dual.sweep()
            self.record.raise_bound(self.dual.bound)
            self.part.offer(values)
            self.near.replace_values(values)
            self.dual.move_prices(values, self.record.cost)

    def _consider_worker(self) -> None:
        """Begin the integer program with what is left for some c, if there is reason to."""
        running = self.worker is not None and self.worker.running
        if self.record.done or (running and self.worker_below >= self.record.cost < inf):
            return
        self.dual.price = self.dual.prices
        for _ in range(_SETTLING_SWEEPS):
            self.dual.sweep()
        self.record.raise_bound(self.dual.bound)
        while not self.record.done and not self._begin_program(running):
            # Nothing was left to choose: more may be left.
            self.pairs *= 2.0

    def _begin_program(self, running: bool) -> bool:
        """Begin a program unless a running one is as good; False if reductions solved it."""
        below, strategies, pairs, count = self._pruning()
        if running and self.worker_part is not None:
            smaller = count <= _MUCH_SMALLER * self.worker_part.num_pairs
            if not smaller or below <= min(self.worker_below, self.record.cost * (1 - 1e-9)):
                return True
        try:
            part = self.part.pruned(strategies, pairs, self.record.after(_PROGRAM_PART))
        except NothingAllowedError:
            self._close(below, inf)
            return False
        if not part.nodes:
            self._offer_found(part, np.zeros(0, dtype=np.int64))
            self._close(below, part.compact.constant)
            return False
        self._begin_worker(part, below)
        return True

    def _pruning(self) -> tuple[float, list[Mask], list[Mask], int]:
        """Return c, what is left for it and its number of pairs: the largest c with few enough.

        What the present assignment takes is left, too, so that the program has a solution.
        """
        nodes, pairs = self.dual.reduced_costs()
        cost, bound = self.record.cost, self.dual.last_bound
        every = np.sort(np.concatenate([table[table < inf] for table in pairs] or [np.zeros(0)]))
        few = int(self.pairs)
        room = cost - bound
        if few < len(every):
            room = min(room, float(every[few]))
        below = min(bound + room, cost)
        # Rounding may not forbid what costs just so much.
        room += 1e-9 * (abs(bound) + abs(room)) if room < inf else 0.0
        kept_nodes = [reduced <= room for reduced in nodes]
        kept_pairs = [reduced <= room for reduced in pairs]
        values = self.near.values
        for kept, value in zip(kept_nodes, values.tolist(), strict=True):
            kept[value] = True
        for kept, (u, v) in zip(kept_pairs, self.part.compact.edges, strict=True):
            kept[values[u], values[v]] = True
        return below, kept_nodes, kept_pairs, int(np.searchsorted(every, room, side="right"))

    def _close(self, below: float, cost: float) -> None:
        """Take in that all assignments cost at least `cost`, or more than `below`."""
        least = min(below, cost)
        if least == inf or self.record.cost <= least + 1e-9 * abs(least):
            self.record.prove()
        else:
            self.record.raise_bound(least)

    def _begin_worker(self, part: Part, below: float) -> None:
        if self.worker is not None:
            self.worker.end()
        left = max(self.record.deadline - time.monotonic(), 0.0)
        seconds = left if below >= self.record.cost else max(_PROGRAM_PART * left, _PROGRAM_S)
        task = Task(
            compact=part.compact,
            seconds=min(seconds, left),
            gap=self.record.gap,
            start=part.projected(self.record.best),
        )
        self.worker = None
        try:
            self.worker = Worker(task)
        except OSError:
            # No process can be had: neighbourhoods and messages go on without one.
            _log.warning("no second process for the integer program", exc_info=True)
        self.worker_part, self.worker_below = part, below

    def _listen(self) -> None:
        """Take in what the second process has found."""
        if self.worker is None or self.worker_part is None:
            return
        for message in self.worker.messages():
            if isinstance(message, Values):
                self._offer_found(self.worker_part, message.values)
            elif isinstance(message, Bound):
                self.record.raise_bound(min(message.bound, self.worker_below))
            else:
                self._end_program(message)

    def _end_program(self, result: ProgramResult) -> None:
        assert self.worker_part is not None
        cost = inf
        if result.values is not None:
            self._offer_found(self.worker_part, result.values)
            cost = self.worker_part.compact.total(result.values)
        if result.optimal:
            self.pairs = min(self.pairs * 1.5, _MOST_PAIRS)
            self._close(self.worker_below, cost if self.record.gap == 0 else result.bound)
        else:
            self.pairs = max(self.pairs * 0.5, _FEWEST_PAIRS)

    def _offer_found(self, part: Part, values: Ints) -> None:
        """Offer an assignment of a pruned part, and search on from it."""
        part.offer(values)
        here = self.part.projected(self.record.best)
        if here is not None:
            self.near.replace_values(here)
