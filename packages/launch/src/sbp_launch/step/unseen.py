"""What no guard sees is found by execution: now and then, a program is captured again.

Python can read a number in more ways than anybody lists. So a program that is taken for the same
one, because nothing that is compared has changed, is captured again now and then:

    seconds of training    0 ...... a ...... 2a ............... 4a ........................ the end
    captured again                  x        x                  x                           x

`a` is so long that a capture is half a percent of it, and less with every further one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sbp_core.errors import RunError
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_torch.graph_capture import difference

#: Seconds of training before the first time, by the seconds of a capture.
_PATIENCE = 200.0

#: A capture at the end may take a second, or this part of the time since the last one.
_AT_THE_END_S, _AT_THE_END = 1.0, 0.05


class UnseenChanges:
    """Says when a program is to be captured again, and compares what comes of it.

    Args:
        capture_s: Seconds that a capture takes.
        now: Returns the seconds of a clock.
    """

    def __init__(self, capture_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._capture_s, self._now = capture_s, now
        self._begun_s = self._looked_s = now()
        self._due_s = self._begun_s + _PATIENCE * capture_s

    def is_due(self, *, at_the_end: bool = False) -> bool:
        """Whether it is to be captured again now.

        Args:
            at_the_end: Whether no step follows.
        """
        since_s = self._now() - self._looked_s
        if at_the_end:
            return self._capture_s <= max(_AT_THE_END_S, _AT_THE_END * since_s)
        return self._now() >= self._due_s

    def look(self, before: LogicalGraph, capture: Callable[[], LogicalGraph]) -> None:
        """See that a step is still the one that was captured.

        Args:
            before: What was captured.
            capture: Captures it again, of a batch of that shape and with the same inputs.

        Raises:
            RunError: it is another one.
        """
        again = capture()
        self._looked_s = self._now()
        if graph_hash(again) != graph_hash(before):
            # It stays due, so that the next step is an error, too.
            raise RunError(
                "the program now makes a different step from the captured one, though no compared "
                "value has changed",
                where=difference(before, again) or "its constants",
                accepted="numbers and objects that forward and loss read from variables, "
                "attributes, entries and closures",
                todo="read the changing value from one of these, or from the batch; the steps "
                "since the change were steps of the program before it",
            )
        passed_s = self._looked_s - self._begun_s
        self._due_s = self._looked_s + max(_PATIENCE * self._capture_s, passed_s)
