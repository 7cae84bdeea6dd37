"""Choose the next firing of a plan's replay: each thread follows its order if data and room allow.

A firing is one execution of an actor, a unit of work of a rank; a credit is a free place of a
register. `interpreter` uses it, and `sbp_core.memory` for the order of a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush

from sbp_core.compile.actors import ActorId, Compute
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.token_game import TokenGame

ThreadId = tuple[int, str]


#: Actors that fire at once: all actors of a collective, else a single one.
Group = tuple[ActorId, ...]


def no_time(actor_id: ActorId) -> float:
    """Return 0: the duration of a firing that takes no time."""
    return 0.0


def ticks(plan: PhysicalPlan) -> Callable[[ActorId], float]:
    """Return a function from an actor to the duration of its firings in instructions."""

    def duration(actor_id: ActorId) -> float:
        actor = plan.by_rank[actor_id[0]].by_name[actor_id[1]]
        return 1 + len(actor.instructions) if isinstance(actor, Compute) else 1

    return duration


class Firings:
    """The position of every thread in its firing order.

    Attributes:
        now: The time at which the latest firing ended, in the unit of durations.

    Args:
        plan: A plan with firing orders.
        game: The token game (counts of data and credits) of that plan; callers start firings there.
    """

    def __init__(self, plan: PhysicalPlan, game: TokenGame) -> None:
        self.game = game
        self.now = 0.0
        self._orders = {
            (part.rank, thread): order
            for part in plan.ranks
            for thread, order in part.orders.items()
        }
        self._done = dict.fromkeys(self._orders, 0)
        # Constant facts about each actor that are needed after each of its firings.
        self._threads: dict[ActorId, ThreadId] = {}
        self._near: dict[ActorId, frozenset[ThreadId]] = {}

    def run(
        self, fire: Callable[[ActorId], None], duration: Callable[[ActorId], float] = no_time
    ) -> bool:
        """Fire actors like ranks that work concurrently, until no actor can fire.

            thread (0, compute)   f0 ------| f1 ------|    b0 --------|
            thread (1, compute)            | f0 --| b0 ----|
                                           ^ `fire` is called at the end of each firing, in the
                                             order of the ends; then its neighbours may begin

        Args:
            fire: Fires an actor and its partners, and calls `advance` for each.
            duration: The time for which an actor's thread is busy with a firing, in any unit; if 0
                for all, low ranks go as far as they can before others receive their messages.

        Returns:
            Whether all threads came to their end.
        """
        # An event queue: firings that have begun, by their ends. Equal ends are ordered by name and
        # rank, so a replay is the same in every process, and on equal ranks. Firings without
        # duration are ordered by rank and name.
        begun: list[tuple[float, str, ActorId]] = []
        busy: set[ThreadId] = set()
        free = list(self._orders)
        while True:
            for thread in free:
                actor_id = self.head(thread)
                if thread not in busy and actor_id is not None and self._can_fire(actor_id):
                    # The partners' threads are at this collective, too (`_can_fire`), and must not
                    # begin it a second time.
                    busy.update(map(self.thread, self.game.partners(actor_id)))
                    took = duration(actor_id)
                    heappush(begun, (self.now + took, actor_id[1] if took else "", actor_id))
            if not begun:
                return next(self.waiting(), None) is None
            self.now, _, actor_id = heappop(begun)
            partners = self.game.partners(actor_id)
            busy.difference_update(map(self.thread, partners))
            fire(actor_id)
            # Only actors whose data or credits the firing has changed may have become ready.
            near: set[ThreadId] = set()
            for partner in partners:
                if partner not in self._near:
                    neighbours = self.game.neighbours(partner)
                    self._near[partner] = frozenset(map(self.thread, neighbours))
                near |= self._near[partner]
            free = sorted(near)

    def run_ahead(self, rank: int, fire: Callable[[ActorId], None]) -> bool:
        """Fire a rank as far ahead as possible: other ranks fire only what it waits for.

            rank 0   f0 f1 | send f2 waits for credit         | send f2 ...
            rank 1         | receive f0, and nothing else     |

        Args:
            rank: The rank.
            fire: As in `run`.

        Returns:
            Whether its threads came to their end.
        """
        threads = [thread for thread in self._orders if thread[0] == rank]
        while heads := [head for thread in threads if (head := self.head(thread)) is not None]:
            # Its own threads as long as one of them can fire; else the actor that the first of them
            # waits for, and no further actors of other ranks.
            needed = next(filter(self._can_fire, heads), None) or self._needed(heads[0])
            if needed is None:
                return False
            fire(needed)
        return True

    def _needed(self, actor_id: ActorId) -> ActorId | None:
        """Follow waiting threads to an actor that can fire; None if they wait for each other."""
        seen: set[ActorId] = set()
        while not self._can_fire(actor_id):
            head = self.head(self.thread(self.blocker(actor_id)[1]))
            if head is None or head in seen:
                return None
            seen.add(head)
            actor_id = head
        return actor_id

    def blocker(self, actor_id: ActorId) -> tuple[str, ActorId]:
        """Return why an actor at the head of its thread cannot fire, and the actor to wait for."""
        for partner in self.game.partners(actor_id):
            wait = next(self.game.waits(partner), None)
            if wait is not None and partner == actor_id:
                return wait.reason, wait.on
            if self.head(self.thread(partner)) != partner:
                return f"waits for rank {partner[0]} to arrive", partner
        partner = next(p for p in self.game.partners(actor_id) if not self.game.is_ready(p))
        return f"waits for rank {partner[0]}", partner

    def head(self, thread: ThreadId) -> ActorId | None:
        """Return the actor that a thread fires next; None at the end of the step."""
        done, order = self._done[thread], self._orders[thread]
        return (thread[0], order[done][0]) if done < len(order) else None

    def thread(self, actor_id: ActorId) -> ThreadId:
        """Return the thread that fires an actor."""
        known = self._threads.get(actor_id)
        if known is None:
            known = self._threads[actor_id] = actor_id[0], self.game.actor(actor_id).thread
        return known

    def advance(self, actor_id: ActorId) -> None:
        """Note that an actor has fired."""
        self._done[self.thread(actor_id)] += 1

    def waiting(self) -> Iterator[ThreadId]:
        """Yield the threads that are not at their end."""
        return (thread for thread in self._orders if self.head(thread) is not None)

    def _can_fire(self, actor_id: ActorId) -> bool:
        return all(
            self.head(self.thread(partner)) == partner and self.game.is_ready(partner)
            for partner in self.game.partners(actor_id)
        )


def firing_order(
    plan: PhysicalPlan,
    stands_for: Mapping[int, int],
    duration: Callable[[ActorId], float] = no_time,
    *,
    ahead: int | None = None,
) -> list[Group] | None:
    """Return the order in which the actors of a step fire; None if threads deadlock.

    Args:
        plan: A plan with firing orders.
        stands_for: For each rank of a folded plan, the rank that represents it.
        duration: See `Firings.run`.
        ahead: The rank that goes as far ahead of all others as possible (see `Firings.run_ahead`);
            None if all work concurrently.
    """
    game = TokenGame(plan, stands_for)
    firings, order = Firings(plan, game), list[Group]()

    def fire(actor_id: ActorId) -> None:
        group = game.partners(actor_id)
        for partner in group:
            game.start(partner)
            game.finish(partner)
            firings.advance(partner)
        order.append(group)

    came = firings.run(fire, duration) if ahead is None else firings.run_ahead(ahead, fire)
    return order if came else None
