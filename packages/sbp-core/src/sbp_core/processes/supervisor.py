"""The supervisor: start the processes of a run, pass on their output, and end all of them.

If a process ends badly, the others get a moment to report why, and are ended. No process remains,
including children of the ranks, even if the supervisor itself is interrupted or killed
(`processes.reaper`). The backend or launcher decides which processes there are
(`BoxingBackend.launch_specs`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import IO, Any
from uuid import uuid4

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.errors import RunError
from sbp_core.output import legible
from sbp_core.processes import reaper
from sbp_core.processes.exit_report import STOPPED_HERE, ExitReport, ProcessExit, RootCauseFinder

#: Lines of each process that are kept for the message about its end.
_LAST_LINES = 30

#: Seconds between SIGTERM and SIGKILL.
_TERM_S = 1.0

#: Seconds between two calls of `more_grace_s`.
_LOOK_S = 0.5

#: Consecutive looks that see all remaining processes stopped, when others have ended: 10 s.
_STOPPED_LOOKS = 20

#: Seconds to read the output that a process wrote before it ended.
_DRAIN_S = 1.0

#: Signals that would end a program without giving it the chance to end its ranks.
_DEADLY = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that a process wrote, without its end; `str` of it shows the rank.

    Args:
        spec: The process that wrote it.
        text: The line.
    """

    spec: LaunchSpec
    text: str

    def __str__(self) -> str:
        """The line after `rank N | `; unchanged for a launcher or several ranks."""
        return self.text if len(self.spec.ranks) > 1 else f"{self.spec.name} | {self.text}"


def write_line(line: Line) -> None:
    """Write a line to standard output."""
    sys.stdout.write(legible(f"{line}\n", sys.stdout))
    sys.stdout.flush()


def supervise(
    launch_specs: Sequence[LaunchSpec],
    *,
    grace_s: float = 3.0,
    more_grace_s: Callable[[], float] = lambda: 0.0,
    on_line: Callable[[Line], None] = write_line,
    timeout_s: float | None = None,
    stops_gently: bool = False,
    asking: Collection[int] = (),
) -> ExitReport:
    """Start processes, wait for all of them, and end those that still run.

    Each is the leader of a session, and so of a process group, of its own: signals of the terminal
    reach the supervisor alone. Ctrl-C is passed on, and the processes get `grace_s` to save their
    states. A SIGTERM, SIGHUP or SIGUSR1 that would end this process raises `SystemExit` instead; a
    signal that is ignored, as under `nohup`, stays ignored.

    Args:
        launch_specs: The processes to start.
        grace_s: Seconds, after one has ended badly, in which the others may end by themselves.
        more_grace_s: Returns how many further seconds they get, such as to save states; it is
            called again while these last. Processes stopped by a signal get none.
        on_line: Called with every line they write, in the thread of the caller.
        timeout_s: Seconds after which they are ended; None waits for ever.
        stops_gently: Whether to pass these signals on, and wait until all processes have ended,
            however long they take to save their states. A second signal is passed on, too, and
            leaves them `grace_s`. Nothing is raised: see `ExitReport.stopped_by`.
        asking: Signals that request a status report from processes. They are passed on, and stop no
            process; they replace a handler that this process has for them.

    Returns:
        How they ended; see `ExitReport.error`.

    Raises:
        RunError: a program cannot be started.
        KeyboardInterrupt: Ctrl-C, once all processes have ended.
    """
    supervision = _Supervision(launch_specs, grace_s, more_grace_s, on_line, asking)
    with supervision as run, run.hearing(gently=stops_gently):
        try:
            run.start()
            run.wait(timeout_s)
        except KeyboardInterrupt:
            run.interrupt()
            raise
        finally:
            run.end()
    return run.report()


@contextlib.contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], None],
    numbers: Collection[int],
    *,
    replaces: bool = False,
) -> Iterator[None]:
    """Handle signals in the block, in the main thread.

    Args:
        handler: Called with the signal's number.
        numbers: The numbers of the signals.
        replaces: Whether handlers of the program are replaced, too; else only signals with the
            default action are handled. A signal that the program ignores stays ignored.
    """
    left = (signal.SIG_DFL, signal.default_int_handler)
    taken: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        taken = {
            number: before
            for number in numbers
            if (before := signal.getsignal(number)) in left
            or (replaces and before not in (signal.SIG_IGN, None))
        }
    for number in taken:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in taken.items():
            signal.signal(number, before)


class _Signal(int):
    """The number of a signal that this process has received."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Process:
    """One process of a run.

    Args:
        spec: The specification by which it was started.
        popen: The process.
        root_cause: Looks for the rank that failed first in its output.
        lines: The last lines that it wrote.
        end: How it ended, or its condition when it was ended; None for now.
    """

    spec: LaunchSpec
    popen: subprocess.Popen[str]
    root_cause: RootCauseFinder
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    end: ProcessExit | None = None


class _Supervision:
    """The processes of one run. Two threads for each: one reads its lines, one awaits its end."""

    def __init__(
        self,
        launch_specs: Sequence[LaunchSpec],
        grace_s: float,
        more_grace_s: Callable[[], float],
        on_line: Callable[[Line], None],
        asking: Collection[int],
    ) -> None:
        self._specs, self._on_line = tuple(launch_specs), on_line
        self._asking = frozenset(asking)
        self._grace_s, self._more_grace_s = grace_s, more_grace_s
        self._mark = f"SBP_SUPERVISED_{uuid4().hex}"
        self._processes: list[_Process] = []
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[tuple[_Process, str | int] | _Signal] = queue.SimpleQueue()
        #: The processes that have ended, in this order, and how many of them by themselves.
        self._ended: list[_Process] = []
        self._num_by_themselves = 0
        self._timeout_s: float | None = None
        self._stopped_by: int | None = None
        self._stop_end: float | None = None
        self._stopped_looks = 0
        self._began = time.monotonic()

    def __enter__(self) -> _Supervision:
        # The reaper is a process of its own, started before all others: it outlives a supervisor
        # that is killed, notices that the pipe is closed, and then ends the processes.
        command = [sys.executable, "-I", "-S", reaper.__file__, self._mark, str(_TERM_S)]
        self._reaper = subprocess.Popen(
            command, stdin=subprocess.PIPE, text=True, start_new_session=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        """End the reaper; without an earlier `done`, it first ends the remaining processes."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        self._reaper.wait()

    @property
    def _pipe(self) -> IO[str]:
        assert self._reaper.stdin is not None, "the reaper reads a pipe"
        return self._reaper.stdin

    def _tell_reaper(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(f"{line}\n")
            self._pipe.flush()

    @contextlib.contextmanager
    def hearing(self, *, gently: bool) -> Iterator[None]:
        """Handle signals in the block: as `SystemExit`, or gently, as described in `supervise`."""

        def leave(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(_Signal(number))

        stopping = (signal.SIGINT, *_DEADLY) if gently else _DEADLY
        leaving = set(stopping).difference(self._asking)
        with (
            _handling(note if gently else leave, leaving),
            _handling(note, self._asking, replaces=True),
        ):
            yield

    def start(self) -> None:
        """Start all processes.

        Raises:
            RunError: one cannot be started.
        """
        for spec in self._specs:
            environment = {"PYTHONUNBUFFERED": "1", **spec.defaults, **os.environ}
            try:
                popen = subprocess.Popen(
                    spec.command,
                    env={**environment, **spec.environment, self._mark: "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(
                    f"{spec.name} cannot be started: {error}",
                    where=" ".join(spec.command),
                    todo="check that the program is installed and may be run",
                ) from error
            process = _Process(spec=spec, popen=popen, root_cause=RootCauseFinder(spec))
            self._processes.append(process)
            # Immediately, because the supervisor may be killed before it starts the next process.
            self._tell_reaper(str(popen.pid))
            for target in (self._read, self._await):
                thread = threading.Thread(target=target, args=(process,), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _read(self, process: _Process) -> None:
        assert process.popen.stdout is not None, "what a process writes comes through a pipe"
        with process.popen.stdout as lines:
            for line in lines:
                self._events.put((process, line.strip("\n\0")))

    def _await(self, process: _Process) -> None:
        self._events.put((process, process.popen.wait()))

    def wait(self, timeout_s: float | None) -> None:
        """Pass on lines until all have ended, or one has failed and the grace is over."""
        end = None if timeout_s is None else self._began + timeout_s
        while len(self._ended) < len(self._specs):
            if self._any_failed():
                self._wait_for_others()
                break
            if self._stop_end is not None:
                self._handle_until(self._stop_end)
                break
            if end is not None and time.monotonic() >= end:
                self._timeout_s = timeout_s
                break
            until = [time.monotonic() + _LOOK_S] if self._ended else []
            until += [] if end is None else [end]
            if not self._handle_next(min(until, default=None)) and self._only_stopped_are_left():
                break
        self._num_by_themselves = len(self._ended)
        for process in self._left():
            self._note_end(process, None)

    def _wait_for_others(self) -> None:
        """Wait, when one has failed, until all have ended or the grace period is over."""
        end = time.monotonic() + self._grace_s
        self._handle_until(end)
        # Processes that a signal has stopped get no further time.
        while any(not reaper.is_stopped(one.popen.pid) for one in self._left()):
            if time.monotonic() >= end + self._more_grace_s():
                break
            self._handle_until(time.monotonic() + _LOOK_S)

    def _only_stopped_are_left(self) -> bool:
        """Whether all remaining processes have been stopped for a while, and others ended well."""
        is_still = bool(self._ended) and all(
            reaper.is_stopped(process.popen.pid, "T") for process in self._left()
        )
        self._stopped_looks = self._stopped_looks + 1 if is_still else 0
        return self._stopped_looks >= _STOPPED_LOOKS

    def _stop(self, number: int) -> None:
        """Ask all processes to end, and wait; after the second signal, not for long."""
        if self._stopped_by is not None and self._stop_end is None:
            self._stop_end = time.monotonic() + self._grace_s
        self._stopped_by = self._stopped_by or number
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Send a signal to all ranks that have not ended."""
        for process in self._left():
            is_rank = len(process.spec.ranks) == 1 or process.spec.forwards_signals
            if is_rank or not reaper.signal_ranks([process.popen.pid], self._mark, number):
                process.popen.send_signal(number)

    def interrupt(self) -> None:
        """Pass Ctrl-C on, and give all processes the time to save their states."""
        for process in self._left():
            process.popen.send_signal(signal.SIGINT)
        self._handle_until(time.monotonic() + self._grace_s)

    def _left(self) -> list[_Process]:
        """Return the processes that have not ended."""
        return [process for process in self._processes if process.end is None]

    def end(self) -> None:
        """End all processes and their children; pass on their output."""
        groups = [process.popen.pid for process in self._processes]
        reaper.end_processes(groups, self._mark, _TERM_S)
        self._tell_reaper("done")
        until = time.monotonic() + _DRAIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        while self._handle_next(0.0):
            pass

    def _handle_until(self, end: float) -> None:
        """Handle lines and exits until all processes have ended, or the time is over."""
        while len(self._ended) < len(self._specs) and time.monotonic() < end:
            if not self._handle_next(end):
                break

    def _handle_next(self, end: float | None) -> bool:
        """Handle one line, or the end of one process; False if none came in time."""
        try:
            limit_s = None if end is None else max(0.0, end - time.monotonic())
            event = self._events.get(timeout=limit_s)
        except queue.Empty:
            return False
        if isinstance(event, _Signal):
            (self._pass_on if event in self._asking else self._stop)(event)
            return True
        process, said = event
        if isinstance(said, int):
            self._note_end(process, said)
            return True
        process.lines.append(said)
        process.root_cause.read(said)
        # A launcher that ends its ranks waits long for a stopped one, which handles no signal.
        if len(process.spec.ranks) > 1 and (stopped := STOPPED_HERE.search(said)):
            reaper.end_stopped(int(stopped["process"]), self._mark)
        try:
            self._on_line(Line(spec=process.spec, text=said))
        except Exception:
            self._on_line = lambda line: None  # it is not called again
            raise
        return True

    def _any_failed(self) -> bool:
        well = {0}
        if self._stopped_by is not None:  # exit codes of processes that ended because of it
            well |= {128 + self._stopped_by, -self._stopped_by, 130}
        return any(one.end is not None and one.end.code not in well for one in self._ended)

    def _note_end(self, process: _Process, code: int | None) -> None:
        """Note, only once, how a process has ended, or its condition if `code` is None."""
        if process.end is not None:
            return
        pid = process.popen.pid
        process.end = ProcessExit(
            spec=process.spec,
            pid=pid,
            code=code,
            after_s=time.monotonic() - self._began,
            stopped=code is None and reaper.is_stopped(pid),
        )
        self._ended.append(process)

    def report(self) -> ExitReport:
        """Return how all processes ended, in order."""
        ends = tuple(
            replace(one.end, last_lines=tuple(one.lines), root_cause=one.root_cause.found)
            for one in self._ended
            if one.end is not None
        )
        return ExitReport(
            exits=ends[: self._num_by_themselves],
            remaining=ends[self._num_by_themselves :],
            timeout_s=self._timeout_s,
            stopped_by=self._stopped_by,
        )
