"""The firing orders of a plan, worked off as data and credits allow. Counts only. No torch.

The checker, the reference runtime and the prediction of memory each replay a step; what a firing
does is theirs, which actor fires next is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.tokens import Place, TokenGame

ThreadId = tuple[int, str]


class Firings:
    """Where every thread is in its order.

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

    def run(self, fire: Callable[[Place], None]) -> bool:
        """Fire what can be, in turns, until nothing can; return whether all did.

        A thread fires once a turn, so that who waits for something takes it soon after it is made.

        Args:
            fire: Fires a place and its partners, and says so by `advance` of each.
        """
        progress = True
        while progress:
            progress = False
            for thread in self._orders:
                if (place := self.head(thread)) is not None and self._can_fire(place):
                    fire(place)
                    progress = True
        return next(self.waiting(), None) is None

    def head(self, thread: ThreadId) -> Place | None:
        """Return what a thread fires next; None at the end of the step."""
        done, order = self._done[thread], self._orders[thread]
        return (thread[0], order[done][0]) if done < len(order) else None

    def thread(self, place: Place) -> ThreadId:
        """Return the thread that fires a place."""
        return place[0], self.game.actor(place).thread

    def advance(self, place: Place) -> None:
        """Note that a place has fired."""
        self._done[self.thread(place)] += 1

    def waiting(self) -> Iterator[ThreadId]:
        """Yield the threads that are not at their end."""
        return (thread for thread in self._orders if self.head(thread) is not None)

    def _can_fire(self, place: Place) -> bool:
        return all(
            self.head(self.thread(partner)) == partner and self.game.is_ready(partner)
            for partner in self.game.partners(place)
        )
