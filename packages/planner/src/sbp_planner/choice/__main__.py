"""The command that solves a choice problem in the JSON format of the IOPDDL contest.

Such a problem gives each node of a graph a strategy at least cost, within a memory limit.

    python -m sbp_planner.choice instance.json[.gz] --time-limit 60 --out assignment.json

Prints cost, bound, gap, seconds, and whether the cost is proved. Each better cost or bound is a
line on stderr. The file is written at each better assignment, so it exists even if the command is
killed. After SIGTERM or SIGINT the best assignment so far is printed, and the command ends at once.
Exit codes: 0 if an assignment was found, 1 if there is none or none was found, 2 if the input is
invalid.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path

from sbp_core.errors import SbpError
from sbp_planner.choice.incumbent import ChoiceSolution
from sbp_planner.choice.iopddl.instance import Rounding, read_problem, write_assignment
from sbp_planner.choice.problem import ChoiceProblem, whole_cost
from sbp_planner.choice.solver import solve

#: Seconds of the limit that are reserved for writing the answer and ending, in all and for each
#: second of reading; and the largest part of the remaining time for both.
_RESERVE_S = 1.0
_RESERVE_A_SECOND = 0.25
_RESERVE_PART = 0.25

#: The part of the time that writing assignments may take.
_WRITE_PART = 0.05

_STOPS = (signal.SIGTERM, signal.SIGINT)


class _Best:
    """The best assignment so far, its file, and the lines about it."""

    def __init__(self, out: Path | None, began: float) -> None:
        self.out = out
        self.began = began
        self.problem: ChoiceProblem | None = None
        self.rounding = Rounding()
        self.assignment: tuple[int, ...] | None = None
        self.cost, self.bound = inf, -inf
        self._written: tuple[int, ...] | None = None
        self._next = 0.0
        self._lock = threading.Lock()

    def keep(self, assignment: Sequence[int]) -> None:
        """Keep an assignment; write it unless another was written just before."""
        self.assignment = tuple(assignment)
        now = time.monotonic()
        if now >= self._next:
            self.write()
            done = time.monotonic()
            self._next = done + (done - now) / _WRITE_PART

    def write(self) -> None:
        """Write the assignment if there is a file for it."""
        with self._lock:
            if self.out is not None and self.assignment not in (None, self._written):
                write_assignment(self.out, self.assignment or ())
                self._written = self.assignment

    def report(self, cost: float, bound: float, _: float) -> None:
        """Write a line of progress."""
        self.cost, self.bound = cost, bound
        words = f"cost {_number(cost)}  bound {_number(bound)}"
        sys.stderr.write(f"{time.monotonic() - self.began:8.2f} s  {words}\n")
        sys.stderr.flush()

    def say(self, solution: ChoiceSolution | None = None) -> None:
        """Print the result; for a search that does not end, the best so far."""
        seconds = time.monotonic() - self.began
        found = solution or ChoiceSolution(
            assignment=self.assignment,
            cost=self.cost,
            bound=self.bound,
            proved=False,
            seconds=seconds,
        )
        cost = "infeasible" if found.proved else "nothing found"
        bound, lines = _number(found.bound), [f"seconds {seconds:.2f}"]
        if found.assignment is not None:
            cost = _number(found.cost)
            if self.problem is not None:
                # All digits of the costs in the file; None if costs have fractions.
                whole = whole_cost(self.problem, found.assignment)
                if whole is not None:
                    cost = str(whole + self.rounding.of(self.problem, found.assignment))
            bound = cost if found.bound >= found.cost else bound
            proved = "yes" if found.proved else "no"
            lines = [f"gap {found.gap:.6g}", *lines, f"proved {proved}"]
        sys.stdout.write("\n".join([f"cost {cost}", f"bound {bound}", *lines]) + "\n")


def main(arguments: Sequence[str] | None = None, began: float | None = None) -> int:
    """Run the command.

    Args:
        arguments: Arguments of the command line; None for the command line.
        began: Time of `time.monotonic` at which the limit began, in s; None: now.
    """
    began = time.monotonic() if began is None else began
    options = _options(arguments)
    best = _Best(options.out, began)

    def stop() -> None:
        """Write and print the best result, and end; the second process then ends, too."""
        best.write()
        best.say()
        sys.stdout.flush()
        os._exit(0 if best.assignment is not None else 1)

    try:
        with _stopped_by_signals(stop):
            best.problem = read_problem(options.instance, best.rounding)
            took = time.monotonic() - began
            left = options.time_limit - took
            reserve = min(_RESERVE_S + _RESERVE_A_SECOND * took, _RESERVE_PART * left)
            solution = solve(
                best.problem,
                time_limit_s=max(left - reserve, 1e-3),
                gap=options.gap,
                progress=best.report,
                keep=best.keep,
            )
            best.write()
    except SbpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    best.say(solution)
    return 0 if solution.assignment is not None else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sbp_planner.choice", description="Solve an instance of the IOPDDL contest."
    )
    parser.add_argument("instance", type=Path, help="a .json or .json.gz file")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--gap", type=float, default=0.0, help="relative gap to stop at")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the assignment")
    options = parser.parse_args(arguments)
    if not options.time_limit > 0 or not options.gap >= 0:
        parser.error("--time-limit must be above 0, and --gap at least 0")
    # Checked here, so that nobody solves for minutes and then cannot write the result.
    out = options.out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        what = f"{out} is a folder" if out.is_dir() else f"{out.parent} is no folder"
        parser.error(f"--out {out}: {what}")
    return options


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Wait for signals in a thread: HiGHS may run for long without looking at any."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    done = threading.Event()

    def wait() -> None:
        while not done.is_set():
            if signal.sigtimedwait(_STOPS, 0.2) is not None:
                stop()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _number(value: float) -> str:
    """Return a number as text, whole numbers with all their digits."""
    return str(int(value)) if value % 1 == 0 else repr(value)


def _process_began() -> float:
    """Return the start of this process, of `time.monotonic`, in s; now, where it is unknown."""
    now = time.monotonic()
    try:
        # The 20th number after the bracketed name: ticks since the machine began.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age


if __name__ == "__main__":
    sys.exit(main(began=_process_began()))
