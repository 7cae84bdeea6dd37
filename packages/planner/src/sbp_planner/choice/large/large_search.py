"""Search a choice problem that is too large for one integer program: find and prove a solution.

The solver (`choice.solver`) calls it last. An assignment gives each node (operator) a strategy.

    messages and prices ──> trees, large neighbourhoods      this process
             │ bounds       │              │ larger ones
             │              v              v
             │      prune, reduce ──> integer programs       a second process
             └──────────────────────── proofs

Pruned choices are in no assignment that costs at most c. If the best assignment of the rest costs
at most c, it is optimal. If not, all assignments cost more than c, which is a bound. So c may be
below the best known cost; the lower it is, the smaller the program. The search takes the largest c
whose program has a size that was solved in time before. Each solved program raises the bound or
finds a better assignment, so the next c is nearer to the best cost, where it is the proof. After a
program that was not solved in time, the second process solves neighbourhoods for a while.

Assignments are improved in three ways: by trees, which change much at once, but only locally; by
neighbourhoods, which see farther and cost more; and by trees drawn at random, at a temperature that
falls (annealing). The way with the largest recent gain gets most of the time. While no assignment
fits, prices of rows above their capacity are raised until one does. While forbidden pairs remain,
nodes are tried one after the other.

Source: Kirkpatrick, Gelatt and Vecchi, "Optimization by simulated annealing", Science 220 (1983).
"""

from __future__ import annotations

import logging
import time
from math import inf

import numpy as np

from sbp_planner.choice.incumbent import Record
from sbp_planner.choice.large.consistent import consistent
from sbp_planner.choice.large.dual import DualAscent, ReducedCosts
from sbp_planner.choice.large.moves import TreeMoves, near
from sbp_planner.choice.large.neighbourhood import Neighbourhoods, Proposal
from sbp_planner.choice.large.worker import Bound, SolverProcess, Task
from sbp_planner.choice.problem import Ints
from sbp_planner.choice.program import ProgramResult
from sbp_planner.choice.reduced_graph import NothingAllowedError
from sbp_planner.choice.remaining_problem import RemainingProblem

_log = logging.getLogger(__name__)

#: Allowed pairs in a program of the second process: at first, at least, and at most.
_PAIRS = 40_000.0
_FEWEST_PAIRS = 4_000.0
_MOST_PAIRS = 400_000.0

#: Part of the remaining time for one program, and its least seconds; part of the remaining time for
#: the reductions before it.
_PROGRAM_PART = 0.15
_PROGRAM_S = 15.0
_PRUNE_PART = 0.1

#: A new program for the proof replaces a running one if it has at most this part of its pairs.
_MUCH_SMALLER = 0.6

#: Neighbourhoods that the second process solves after a program that it could not solve; the number
#: while the gap is wide, so a proof is far; the factor by which they are larger than those of this
#: process, and seconds for each.
_BLOCKS = 6
_MANY_BLOCKS = 24
_WIDE_GAP = 0.005
_LARGER = 3.0
_BLOCK_S = 12.0

#: Sweeps of messages between two looks at the time and the bound; sweeps to settle the messages
#: after a change of prices; a rise of the bound, as a part of the gap, that counts as none; after
#: so many of these the sweeps end.
_SWEEPS = 20
_SETTLING_SWEEPS = 3
_LITTLE = 0.003
_LITTLE_ROUNDS = 4

#: Part of the time for messages at first; the part of that after which an assignment is decoded and
#: made to fit, while none fits (again after twice as long); later their part compared to the search
#: between two rounds of them, at least and at most; the rise, as a part of the gap, that gives them
#: the most; least seconds of the search.
_MESSAGES_PART = 0.35
_FIRST_MESSAGES = 0.03
_MESSAGES_SHARES = (0.1, 1.0)
_MUCH = 0.03
_NEAR_S = 2.0

#: Part of the time for messages while a first assignment is looked for.
_BEGIN_MESSAGES = 0.6

#: Part of the remaining time for making an assignment fit, at first.
_FIRST_PART = 0.1

#: Part of the remaining time for finding an assignment without forbidden pairs.
_CONSISTENT_PART = 0.4

#: The spread of the logarithm of the prices from forest to forest; so many forests without a better
#: assignment end the search by trees.
_PRICE_SPREAD = 0.25
_VAIN_FORESTS = 16

#: First temperatures, in terms of the gap of a node, and the last one as a part of the first;
#: forests on the way, at first and at most, and the factor by which they grow after a failure; the
#: part of the remaining time that they may take.
_TEMPERATURES = (0.25, 4.0)
_COOLED = 0.05
_DRAWS = (100, 3200)
_MORE_DRAWS = 1.5
_DRAWS_PART = 0.1

#: Part of all strategies in the core of the trees, at least and at most; from 1 on all of them.
_CORE_PARTS = (0.05, 1.5)

#: Part of the remaining time that one oscillation may take.
_OSCILLATION_PART = 0.05

#: Decay of the average gain of a way to search; least weight of a way.
_MEMORY = 0.7
_LEAST_WEIGHT = 0.15


class LargeSearch:
    """Messages and neighbourhoods here, integer programs in a second process."""

    def __init__(self, record: Record, part: RemainingProblem, begin: Ints | None) -> None:
        self.record = record
        self.part = part
        self.dual = DualAscent(part.compact)
        self.dual.sweep()
        self.near = Neighbourhoods(part.compact, self.dual.decode() if begin is None else begin)
        capacity = np.maximum(part.compact.capacity, 1)
        usual = abs(self.dual.bound) / max(part.compact.num_nodes, 1)
        self.usual = usual / (capacity.mean() if len(capacity) else 1.0)
        self.random = np.random.default_rng(0)
        # Moves with all strategies; moves with the core, and the part of all strategies in it.
        self.whole = TreeMoves(part.compact, self.near.forbidden, self.usual)
        self.core = self.whole
        self.core_part = 1.0
        # Recent gain of neighbourhoods, annealing, and oscillation, in cost a second.
        self.gains = np.zeros(3)
        # Recent seconds of each of them; 0 before its first turn.
        self.seconds = np.zeros(3)
        self.draws = float(_DRAWS[0])
        self.pairs = _PAIRS
        self.blocks = 0
        self.worker: SolverProcess | None = None
        self.worker_failed = False
        # The work of the second process: a program and its c, or a neighbourhood.
        self.worker_part: RemainingProblem | None = None
        self.worker_below = inf
        self.worker_block: Proposal | None = None
        self._offered = 0.0
        self._messages_s = 0.0
        # An assignment that trees do not improve.
        self._settled: Ints | None = None

    def begin(self, until: float) -> None:
        """Find an assignment, by `until` if it is easy to find.

        Args:
            until: Time of `time.monotonic`, in s.
        """
        now = time.monotonic()
        self._pass_messages(now + _BEGIN_MESSAGES * (until - now))
        if not self.record.done:
            self._fit(self.dual.decode(), until)
            if not self.near.fits:
                self._fit(self.near.values, self.record.after(_FIRST_PART))
            self._offer_near(force=True)

    def run(self) -> None:
        """Search until the best is proved or the time is up."""
        try:
            if not self.near.fits:
                self._fit(self.near.values, self.record.after(_FIRST_PART))
            if self.near.merit.forbidden:
                self._avoid_forbidden(self.record.after(_FIRST_PART))
            settled = self.record.after(_MESSAGES_PART)
            self._find_first(settled)
            self._pass_messages(settled)
            self._fit(self.dual.decode(), self.record.after(_FIRST_PART))
            self._move_trees()
            if self.near.merit.forbidden:
                self._avoid_forbidden(self.record.after(_CONSISTENT_PART))
                self._move_trees()
            share = _MESSAGES_SHARES[1]
            while not self.record.done:
                began = time.monotonic()
                self._guide()
                self._feed_worker()
                self._search_near(time.monotonic() + max(_NEAR_S, self._messages_s / share))
                took, before = time.monotonic() - began, self.dual.bound
                self._pass_messages(time.monotonic() + share * took)
                # While the bound rises fast, messages have most of the time.
                rise = (self.dual.bound - before) / max(self.record.cost - before, 1e-300)
                share = max(share / 2, _MESSAGES_SHARES[0])
                if rise > _MUCH:
                    share = _MESSAGES_SHARES[1]
        finally:
            self._offer_near(force=True)
            if self.worker is not None:
                self.worker.end()

    def _find_first(self, until: float) -> None:
        """Pass messages for longer and longer, until a decoded assignment can be made to fit."""
        now = time.monotonic()
        seconds = _FIRST_MESSAGES * (until - now)
        while not self.near.fits and not self.record.done and now < until:
            self._pass_messages(min(until, now + seconds))
            self._fit(self.dual.decode(), self.record.after(_FIRST_PART))
            now, seconds = time.monotonic(), 2 * seconds
        # Penalties that rose at early prices would be in the way of better ones.
        self.whole.penalty = np.zeros_like(self.whole.penalty)

    def _search_near(self, until: float) -> None:
        """Search by trees, then by neighbourhoods or annealing, once or more."""
        while not self.record.done:
            self._move_trees()
            way = self._drawn_way()
            before, began = self.near.merit, time.monotonic()
            if not self.near.fits:
                self._fit(self.near.values, self.record.after(_FIRST_PART))
            if way == 0 or not self.near.fits:
                self.near.step(self.record.deadline)
            elif way == 1 or not len(self.part.compact.capacity):
                self._anneal()
            else:
                # The present assignment may exceed capacities for a while.
                values, until_fit = self.near.values, self.record.after(_OSCILLATION_PART)
                moved = self._moves(values).oscillated(values, self.dual.prices, until_fit)
                self._fit(moved, until_fit)
            gain = before.cost - self.near.merit.cost if before.excess == 0 else 0.0
            took = max(time.monotonic() - began, 0.05)
            memory = _MEMORY if self.seconds[way] else 0.0
            for of, new in ((self.seconds, took), (self.gains, max(gain, 0.0) / took)):
                of[way] = memory * of[way] + (1 - memory) * new
            self._offer_near()
            self._listen()
            self._feed_worker()
            if time.monotonic() >= until:
                return

    def _drawn_way(self) -> int:
        """Draw the next way: each once, then mostly the one with the largest gain in its time."""
        if not self.seconds.all():
            return int(self.seconds.argmin())
        weights = self.gains / self.gains.sum() if self.gains.any() else np.ones(3)
        # Weights are for time, not for turns: some ways are many times as quick as others.
        weights = np.maximum(weights, _LEAST_WEIGHT) / self.seconds
        return int(self.random.choice(3, p=weights / weights.sum()))

    def _move_trees(self) -> None:
        """Improve the present assignment by trees, until some forests gain nothing."""
        if self.near.values is self._settled:
            return
        vain = 0
        while vain < _VAIN_FORESTS and not self.record.done:
            before = self.near.merit
            factor = np.exp(self.random.uniform(-1, 1) * _PRICE_SPREAD)
            self.near.replace_values(
                self._moves(self.near.values).improve(self.near.values, factor * self.dual.prices)
            )
            better = before.cost - self.near.merit.cost > 1e-7 * abs(before.cost)
            vain = 0 if better or self.near.merit.excess < before.excess else vain + 1
            self._offer_near()
        self._settled = self.near.values

    def _anneal(self) -> None:
        """Draw trees at a falling temperature, starting from the present assignment."""
        began = time.monotonic()
        until = self.record.after(_DRAWS_PART)
        unit = max(self.near.merit.cost - self.dual.bound, 0.0) / self.part.compact.num_nodes
        first = unit * np.exp(self.random.uniform(*np.log(_TEMPERATURES)))
        values, done = self.near.values, 0.0
        moves = self._moves(values)
        draws = 0
        while done < 1 and not self.record.done:
            values = moves.drawn(values, self.dual.prices, first * _COOLED**done)
            draws += 1
            done = max(draws / self.draws, (time.monotonic() - began) / max(until - began, 1e-9))
        for _ in range(_VAIN_FORESTS):
            if self.record.done:
                break
            values = moves.improve(values, self.dual.prices)
        before = self.near.merit
        self.near.replace_values(values)
        more = 1.0 if self.near.merit < before else _MORE_DRAWS
        self.draws = min(self.draws * more, _DRAWS[1])

    def _offer_near(self, force: bool = False) -> None:
        """Offer the present assignment; not too often, because it is extended to all nodes."""
        now = time.monotonic()
        if force or now >= self._offered:
            self.part.offer(self.near.values)
            took = time.monotonic() - now
            self._offered = now + 10 * took

    def _pass_messages(self, until: float) -> None:
        """Sweep until the bound hardly rises, or the time is up."""
        little, began = 0, time.monotonic()
        self.dual.restart_prices()
        while not self.record.done and little < _LITTLE_ROUNDS:
            before = self.dual.bound
            for _ in range(_SWEEPS):
                self.dual.sweep()
                self.dual.move_prices(self.record.cost)
                if time.monotonic() >= until:
                    break
            self.record.raise_bound(self.dual.bound)
            self.near.replace_values(self.dual.decode())
            self._offer_near()
            self._listen()
            gap = min(self.record.cost - self.dual.bound, abs(self.dual.bound))
            little = little + 1 if self.dual.bound - before <= _LITTLE * gap else 0
            self._messages_s = time.monotonic() - began
            if time.monotonic() >= until:
                return

    def _avoid_forbidden(self, until: float) -> None:
        """Look for an assignment without forbidden pairs, near the one of the messages."""
        wanted = self.dual.reduced_costs().nodes
        values = consistent(self.part.compact, wanted, until)
        if values is not None:
            self._fit(values, until + _FIRST_PART * max(self.record.deadline - until, 0.0))

    def _fit(self, values: Ints, until: float) -> None:
        """Make an assignment fit by penalties, and then better by trees; keep it if it is good."""
        before = self.near.merit
        moves = self._moves(values)
        fitted = moves.fitted(values, self.dual.prices, until)
        for _ in range(_VAIN_FORESTS):
            if time.monotonic() >= until:
                break
            fitted = moves.improve(fitted, self.dual.prices)
        self.near.replace_values(fitted)
        self._offer_near(force=before.excess > 0 and self.near.fits)

    def _guide(self) -> None:
        """Let the messages settle at the best prices; neighbourhoods then follow them."""
        self.dual.price = self.dual.prices
        for _ in range(_SETTLING_SWEEPS):
            self.dual.sweep()
        self.record.raise_bound(self.dual.bound)
        self.near.follow(self.dual.reduced_costs(), self.dual.prices)
        self.core_part = float(np.exp(self.random.uniform(*np.log(_CORE_PARTS))))
        self._draw_core(self.near.values)
        self._settled = None

    def _draw_core(self, values: Ints) -> None:
        """Make the core: the best strategies by the guide, and the strategies of an assignment."""
        compact, guide, before, kept = self.part.compact, self.near.guide, self.core, None
        if guide is not None:
            kept = near(compact, values, guide.nodes, self.core_part)
        self.core = self.whole
        if kept is not None:
            seed = int(self.random.integers(1 << 31))
            self.core = TreeMoves(compact, self.near.forbidden, self.usual, seed, kept)
            self.core.penalty = before.penalty

    def _moves(self, values: Ints) -> TreeMoves:
        """Return the moves for an assignment: the present core, or one with its strategies."""
        if not self.core.holds(values):
            self._draw_core(values)
        return self.core

    def _feed_worker(self) -> None:
        """Give the second process something to do, if it makes sense."""
        if self.record.done or self.worker_failed or self.near.guide is None:
            return
        running = self.worker is not None and self.worker.running
        if running and self.worker_block is not None:
            return
        if not running and self.blocks > 0:
            self.blocks -= 1
            proposal = self.near.propose(_LARGER)
            if proposal is not None:
                left = max(self.record.deadline - time.monotonic(), 0.0)
                of = proposal.part, min(_BLOCK_S, left), 1e-5, proposal.start
                self._submit(Task(*of, proposal.elastic, tuple(proposal.rows)))
                self.worker_block, self.worker_part = proposal, None
            return
        if running and self.worker_below >= self.record.cost < inf:
            return
        while not self.record.done and not self._begin_program(self.near.guide, running):
            # Nothing was left to choose, so more pairs may be left.
            self.pairs *= 2.0

    def _begin_program(self, guide: ReducedCosts, running: bool) -> bool:
        """Begin a program unless a running one is as good; False if reductions solved it."""
        below, room, count = guide.room_for(self.record.cost, int(self.pairs))
        if running and self.worker_part is not None:
            smaller = count <= _MUCH_SMALLER * self.worker_part.num_pairs
            if not smaller or below <= min(self.worker_below, self.record.cost * (1 - 1e-9)):
                return True
        try:
            part = self.part.pruned(
                *guide.left(self.part.compact, room, self.near.values),
                self.record.after(_PRUNE_PART),
            )
        except NothingAllowedError:
            self._close(below, inf)
            return False
        if not part.nodes:
            self._offer_found(part, np.zeros(0, dtype=np.int64))
            self._close(below, part.compact.constant)
            return False
        left = max(self.record.deadline - time.monotonic(), 0.0)
        seconds = left if below >= self.record.cost else max(_PROGRAM_PART * left, _PROGRAM_S)
        start = part.projected(self.record.best)
        if running and self.worker is not None:
            self.worker.end()
        self._submit(Task(part.compact, min(seconds, left), self.record.gap, start))
        self.worker_block, self.worker_part, self.worker_below = None, part, below
        return True

    def _submit(self, task: Task) -> None:
        try:
            if self.worker is None or not self.worker.alive:
                self.worker = SolverProcess()
            self.worker.submit(task)
        except OSError:
            # No process can be started: neighbourhoods and messages go on without one.
            _log.warning("no second process for the integer program", exc_info=True)
            self.worker_failed = True

    def _close(self, below: float, cost: float) -> None:
        """Record that all assignments cost at least `cost`, or more than `below`."""
        least = min(below, cost)
        if least == inf or self.record.cost <= least + 1e-9 * abs(least):
            self.record.prove()
        else:
            self.record.raise_bound(least)

    def _listen(self) -> None:
        """Record the results of the second process."""
        if self.worker is None:
            return
        for message in self.worker.messages():
            block, part = self.worker_block, self.worker_part
            if block is not None:
                if isinstance(message, ProgramResult):
                    took = (time.monotonic() - self.worker.began) / _LARGER
                    self.near.accept(block, message, took)
                    self.worker_block = None
                    self._offer_near()
                continue
            if part is None:
                continue
            if isinstance(message, Bound):
                self.record.raise_bound(min(message.bound, self.worker_below))
                continue
            if message.values is not None:
                self._offer_found(part, message.values)
            if isinstance(message, ProgramResult):
                cost = inf if message.values is None else part.compact.total(message.values)
                if message.optimal:
                    self.pairs = min(self.pairs * 1.5, _MOST_PAIRS)
                    self._close(self.worker_below, message.bound if self.record.gap else cost)
                else:
                    self.pairs = max(self.pairs * 0.5, _FEWEST_PAIRS)
                    gap = self.record.cost - self.record.bound
                    wide = gap > _WIDE_GAP * abs(self.record.cost)
                    self.blocks = _MANY_BLOCKS if wide else _BLOCKS
                self.worker_part = None
        if not self.worker.alive:
            # It died, perhaps out of memory: another one would, too.
            _log.warning("the second process for integer programs has died")
            self.worker_failed = True

    def _offer_found(self, part: RemainingProblem, values: Ints) -> None:
        """Offer an assignment of a pruned part, and continue the search from it."""
        part.offer(values)
        here = self.part.projected(self.record.best)
        if here is not None:
            self.near.replace_values(here)
