"""The search for a counted limit whose plans fit, which every planner under a limit shares.

A planner counts roughly what a choice holds; the compiled plan holds something else. What differs
changes little from one choice to the next, so the counted limit is corrected by it, and kept
between limits whose plans fit and limits whose plans do not:

    counted limit   0 |-----------below=====wanted=====above-----------|
                          plans fit    |                  plans do not fit
                                       wanted = counted + limit - held, or halfway

Ranks that share no stage have limits of their own: one `LimitSearch` each, and one plan is compiled
of what all of them ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

ChoiceT = TypeVar("ChoiceT")

#: From a counted limit that allows nothing to the next one, where none is known to be too high.
_GROWTH = 1.25


@dataclass(slots=True, kw_only=True)
class LimitSearch(Generic[ChoiceT]):
    """The counted limits of some ranks: which are known to fit, and which one to try next.

    Args:
        limit_bytes: What a rank may hold.
        choose: Returns the best choice within a counted limit in bytes; None if there is none, or
            if it need not be compiled.
        counted: Returns the bytes that are counted for a choice.
        wanted: The counted limit to begin with.
        above: A counted limit that is too high.
        resolution_bytes: Limits that are no further apart than this are not told apart.
        tries: How often to choose, at most.
        below: A counted limit that is not too high.
        asked: The choice to compile; in the end the one that fits, None if none does.
        fitting: The choice of the highest limit that is known to fit; None if none is.
    """

    limit_bytes: float
    choose: Callable[[float], ChoiceT | None]
    counted: Callable[[ChoiceT], float]
    wanted: float
    above: float = inf
    resolution_bytes: float = 0.0
    tries: int = 8
    below: float = 0.0
    asked: ChoiceT | None = None
    fitting: ChoiceT | None = None
    #: The counted limit that `asked` is the best choice within.
    _within: float = 0.0

    def advance(self) -> bool:
        """Ask for the next choice; whether there is one. If not, go back to the one that fits."""
        while self.tries > 0 and self.above - self.below > self.resolution_bytes:
            if not self.below < self.wanted < self.above:
                open_ended = self.above == inf
                self.wanted = _GROWTH * self.below if open_ended else (self.below + self.above) / 2
            self.tries -= 1
            found = self.choose(self.wanted)
            if found is not None and found != self.fitting:
                self.asked, self._within = found, self.wanted
                return True
            self.below = self.wanted
        self.asked, self._within = self.fitting, 0.0
        return False

    def see(self, held_bytes: float) -> None:
        """Learn what the fullest rank holds under the choice that was asked for."""
        if self.asked is None:
            return
        counted = self.counted(self.asked)
        if held_bytes <= self.limit_bytes:
            self.below, self.fitting = max(self.below, self._within), self.asked
        else:
            self.above = min(self.above, counted)
            # Ranks hold a little more or less with what others do: what fitted may not any more.
            if self.below >= self.above:
                self.below, self.fitting = 0.0, None
        self.wanted = counted + self.limit_bytes - held_bytes


def search_limits(
    searches: Sequence[LimitSearch[ChoiceT]], compiled: Callable[[], Sequence[float]]
) -> None:
    """Correct the counted limits of all ranks until what fits is next to what does not.

    Args:
        searches: Of ranks that share no stage.
        compiled: Compiles what all of them have chosen, and returns for each what its fullest rank
            holds, in bytes.
    """
    while True:
        went_on = [one.advance() for one in searches]
        if not any(went_on):
            return
        for one, held_bytes in zip(searches, compiled(), strict=True):
            one.see(held_bytes)
