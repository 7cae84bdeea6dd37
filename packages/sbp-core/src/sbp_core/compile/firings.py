"""The firing orders of a plan, worked off as data and credits allow. Counts only.

The checker, the reference runtime and the prediction of memory each replay a step; what a firing
does is theirs, which actor fires next is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.token_game import ActorId, TokenGame

ThreadId = tuple[int, str]


class Firings:
    """Replays the firing orders of all threads: where each is, and which may go on.

    Args:
        plan: With firing orders.
        game: Of that plan; who fires starts and finishes there.
    """

    def __init__(self, plan: PhysicalPlan, game: TokenGame) -> None:
        self.game = game
        self._orders = {
            (part.rank, thread): order
            for part in plan.ranks
            for thread, order in part.orders.items()
        }
        self._done = dict.fromkeys(self._orders, 0)

    def run(
        self, fire: Callable[[ActorId], None], lasts: Callable[[ActorId], int] = lambda place: 0
    ) -> bool:
        """Fire what can be, as ranks that work at once do, until nothing can.

        Args:
            fire: Fires a place and its partners, and says so by `advance` of each; called at the
                end of the firing.
            lasts: How long a place's thread is busy with it, in any unit; if 0 for all, low ranks
                go as far as they can before others take what they sent.

        Returns:
            Whether all threads came to their end.
        """
        begun: list[tuple[int, ActorId]] = []
        busy: set[ThreadId] = set()
        now, free = 0, list(self._orders)
        while True:
            for thread in free:
                place = self.head(thread)
                if thread not in busy and place is not None and self._can_fire(place):
                    busy.update(map(self.thread, self.game.partners(place)))
                    heappush(begun, (now + lasts(place), place))
            if not begun:
                return next(self.waiting(), None) is None
            now, place = heappop(begun)
            partners = self.game.partners(place)
            busy.difference_update(map(self.thread, partners))
            fire(place)
            changed = {near for partner in partners for near in self.game.neighbours(partner)}
            free = sorted(set(map(self.thread, changed)))

    def head(self, thread: ThreadId) -> ActorId | None:
        """Return what a thread fires next; None at the end of the step."""
        done, order = self._done[thread], self._orders[thread]
        return (thread[0], order[done][0]) if done < len(order) else None

    def thread(self, place: ActorId) -> ThreadId:
        """Return the thread that fires a place."""
        return place[0], self.game.actor(place).thread

    def advance(self, place: ActorId) -> None:
        """Note that a place has fired."""
        self._done[self.thread(place)] += 1

    def waiting(self) -> Iterator[ThreadId]:
        """Yield the threads that are not at their end."""
        return (thread for thread in self._orders if self.head(thread) is not None)

    def _can_fire(self, place: ActorId) -> bool:
        return all(
            self.head(self.thread(partner)) == partner and self.game.is_ready(partner)
            for partner in self.game.partners(place)
        )
