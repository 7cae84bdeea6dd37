"""Solve integer programs in a separate process, which `large_search` can end at any moment.

The parent writes pickled `Task`s to the worker's stdin, one at a time, and reads pickled results
from its stdout: `Bound`s and `Values` as they are found, and one `ProgramResult` at the end of a
task.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Ints
from sbp_planner.choice.program import ProgramResult, solve_program

#: Seconds between two checks whether the parent still exists.
_LOOK_S = 1.0


class Task(NamedTuple):
    """A program for a worker; the arguments of `solve_program`."""

    compact: Compact
    seconds: float
    gap: float
    start: Ints | None
    elastic: bool = False
    rows: tuple[int, ...] = ()


class Bound(NamedTuple):
    """No allowed assignment costs less."""

    bound: float


class Values(NamedTuple):
    """An assignment that is allowed and fits, int64 of shape (nodes,)."""

    values: Ints


Message = Bound | Values | ProgramResult


class SolverProcess:
    """A process that solves integer programs, one after the other.

    Attributes:
        alive: Whether it can take tasks; false once it has died or was ended.
        running: Whether more messages of the present task may come.
        began: Start of the present task, time of `time.monotonic`, in s.
    """

    def __init__(self) -> None:
        # The child uses the import path of the parent, however that was set.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sbp_planner.choice.large.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.alive, self.running = True, False
        self.began = time.monotonic()
        # A task may be larger than the pipe: neither process may wait for the other in this thread.
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, task: Task) -> None:
        """Begin a task; no other task may be running."""
        assert not self.running
        self.running, self.began = True, time.monotonic()
        self._tasks.put(task)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended, which its reader notices
            while (task := self._tasks.get()) is not None:
                pickle.dump(task, self._process.stdin)
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                self._messages.put(pickle.load(self._process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            # The process was ended, or died: no more messages come.
            self._messages.put(None)

    def messages(self) -> list[Message]:
        """Return the messages since the last call."""
        found: list[Message] = []
        with suppress(queue.Empty):
            while self.alive:
                message = self._messages.get_nowait()
                if message is None:
                    self.alive = False
                else:
                    found.append(message)
                self.running = message is not None and not isinstance(message, ProgramResult)
        return found

    def end(self) -> None:
        """End the process at once."""
        self.alive = self.running = False
        self._tasks.put(None)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # unread data cannot be flushed
                    pipe.close()


def main() -> None:
    """Solve the tasks on stdin."""
    parent = os.getppid()

    def end_with_parent() -> None:
        """End this process soon after its parent, even one that was killed."""
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not get between the messages

    def send(message: Any) -> None:
        pickle.dump(message, channel)
        channel.flush()

    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        try:
            task: Task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        result = solve_program(
            task.compact,
            time.monotonic() + task.seconds,
            task.gap,
            task.start,
            on_better=lambda values: send(Values(values)),
            on_bound=lambda bound: send(Bound(bound)),
            elastic=task.elastic,
            rows=task.rows,
        )
        send(result)


if __name__ == "__main__":
    # Pickles use the real name of the module for its classes, not `__main__`.
    from sbp_planner.choice.large import worker

    worker.main()
