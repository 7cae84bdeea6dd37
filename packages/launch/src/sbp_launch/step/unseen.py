"""Find changes of a captured program that its guards miss, by capturing it from time to time.

Guards check before each step that the program is the captured one. They cannot cover all
ways in which Python reads a number. So it is captured again even if no guard has seen a change:

    seconds of training    0 ...... a ...... 2a ............... 4a ........................ the end
    captured again                  x        x                  x                           x

`a` is 200 captures long, so a capture takes half a percent of it, and less of the later periods.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sbp_core.errors import RunError
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_torch.graph_capture import difference

#: Seconds of training before the first repeated capture, per second that a capture takes.
_PATIENCE = 200.0

#: A capture at the end may take one second, or this fraction of the time since the last capture.
_AT_THE_END_S, _AT_THE_END = 1.0, 0.05


class UnseenChanges:
    """Decides when to capture a program again, and compares the result.

    Args:
        capture_s: Seconds that a capture takes.
        now: Returns the time of a clock in seconds.
    """

    def __init__(self, capture_s: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._capture_s, self._now = capture_s, now
        self._begun_s = self._looked_s = now()
        self._due_s = self._begun_s + _PATIENCE * capture_s

    def is_due(self, *, at_the_end: bool = False) -> bool:
        """Whether to capture the program again now.

        Args:
            at_the_end: Whether no step follows.
        """
        since_s = self._now() - self._looked_s
        if at_the_end:
            return self._capture_s <= max(_AT_THE_END_S, _AT_THE_END * since_s)
        return self._now() >= self._due_s

    def look(self, before: LogicalGraph, capture: Callable[[], LogicalGraph]) -> None:
        """Check that a step is still the one that was captured.

        Args:
            before: The graph that was captured before.
            capture: Captures the step again, for a batch of the same shape and the same inputs.

        Raises:
            RunError: the step is another one.
        """
        again = capture()
        self._looked_s = self._now()
        if graph_hash(again) != graph_hash(before):
            # The capture stays due, so that the next step raises, too.
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
