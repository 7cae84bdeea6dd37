"""Find the memory limit to plan with, so that the compiled plan fits the device's real limit.

Planners and `offload_fit` use it. A planner counts the memory of a choice roughly; the compiled
plan holds a different amount. The difference changes little from one choice to the next. So the
limit of the counted memory, the counted limit, is corrected by the difference, and kept between the
limits whose plans fit and the limits whose plans do not:

    counted limit   0 |-----------below=====wanted=====above-----------|
                          plans fit    |                  plans do not fit
                                       wanted = counted + limit - held, or halfway

Ranks that share no stage have separate limits: one `LimitSearch` each. One plan is compiled from
the choices of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Generic, TypeVar

ChoiceT = TypeVar("ChoiceT")

#: Growth of the counted limit per try, as long as none is known to be too high.
_GROWTH = 1.25


@dataclass(slots=True, kw_only=True)
class LimitSearch(Generic[ChoiceT]):
    """The counted limits of some ranks: which are known to fit, and which one to try next.

    Args:
        limit_bytes: The memory limit of a rank.
        choose: Returns the best choice within a counted limit in bytes; None if there is none, or
            if it need not be compiled.
        counted: Returns the counted bytes of a choice.
        wanted: The counted limit to begin with.
        above: A counted limit that is too high.
        resolution_bytes: The search ends when `above` and `below` are no further apart than this.
        tries: How often to choose, at most.
        below: A counted limit that is not too high.
        asked: The choice to compile; in the end the choice that fits, None if none does.
        fitting: The choice at the highest limit that is known to fit; None if none is.
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
    #: The counted limit within which `asked` is the best choice.
    _within: float = 0.0

    def advance(self) -> bool:
        """Choose again; return whether there is a new choice. Else `asked` becomes `fitting`."""
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
        """Record the memory of the fullest rank under the choice that was compiled."""
        if self.asked is None:
            return
        counted = self.counted(self.asked)
        if held_bytes <= self.limit_bytes:
            self.below, self.fitting = max(self.below, self._within), self.asked
        else:
            self.above = min(self.above, counted)
            # The choices of other ranks change the memory of these a little: a choice that fitted
            # may no longer fit.
            if self.below >= self.above:
                self.below, self.fitting = 0.0, None
        self.wanted = counted + self.limit_bytes - held_bytes


def search_limits(
    searches: Sequence[LimitSearch[ChoiceT]], compiled: Callable[[], Sequence[float]]
) -> None:
    """Correct the counted limits of all ranks until the fitting and the failing choice are close.

    Args:
        searches: Searches of ranks that share no stage.
        compiled: Compiles the choices of all searches together, and returns for each search the
            bytes of its fullest rank.
    """
    while True:
        went_on = [one.advance() for one in searches]
        if not any(went_on):
            return
        for one, held_bytes in zip(searches, compiled(), strict=True):
            one.see(held_bytes)
