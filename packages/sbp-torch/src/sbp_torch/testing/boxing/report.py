"""A pytest plugin that counts boxing cases: `pytest -p sbp_torch.testing.boxing.report`.

At the end, it prints the number of cases of the boxing conformance suite, and their time, by
backend and number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sbp_torch.testing.boxing.suite import CaseCount

_LOGGER = "sbp_torch.testing.boxing"


class CountCases(logging.Handler):
    """A log handler that collects the counts that suites log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.tallies: list[CaseCount] = []

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        tally = getattr(record, "tally", None)
        if isinstance(tally, CaseCount):
            self.tallies.append(tally)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the table; called by pytest."""
        if self.tallies:
            terminalreporter.section("boxing cases")
            for line in summary(self.tallies):
                terminalreporter.write_line(line)


def summary(tallies: Iterable[CaseCount]) -> list[str]:
    """Return a line for each backend and number of ranks, and a line for the total."""
    cases: dict[tuple[str, int], int] = {}
    times_s: dict[tuple[str, int], float] = {}
    for tally in tallies:
        key = (tally.backend, tally.num_ranks)
        cases[key] = cases.get(key, 0) + tally.num_cases
        times_s[key] = times_s.get(key, 0.0) + tally.time_s
    lines = [
        f"{backend:<10} {num_ranks:>2} ranks {count:>8} cases {times_s[backend, num_ranks]:>8.1f} s"
        for (backend, num_ranks), count in sorted(cases.items())
    ]
    total, total_s = sum(cases.values()), sum(times_s.values())
    return [*lines, f"{'all':<10} {'':>8} {total:>8} cases {total_s:>8.1f} s"]


def pytest_configure(config: Any) -> None:
    """Start counting; called by pytest."""
    counter, logger = CountCases(), logging.getLogger(_LOGGER)
    logger.setLevel(logging.INFO)
    logger.addHandler(counter)
    config.pluginmanager.register(counter, "count-boxing-cases")
    config.add_cleanup(lambda: logger.removeHandler(counter))
