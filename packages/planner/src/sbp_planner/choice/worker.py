"""The integer program in a process of its own, beside the search: it can be ended at any moment.

The parent writes one pickled `Task` to the worker's stdin, and reads pickled results from its
stdout: `Bound`s and `Values` as they are found, one `ProgramResult` at the end.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from sbp_planner.choice.compact import Compact
from sbp_planner.choice.problem import Ints
from sbp_planner.choice.program import ProgramResult, solve_program


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Task:
    """What a worker is to solve: see `solve_program`."""

    compact: Compact
    seconds: float
    gap: float
    start: Ints | None


@dataclass(frozen=True, slots=True)
class Bound:
    """No allowed assignment costs less."""

    bound: float


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """An assignment that is allowed and fits, int64 of shape (nodes,)."""

    values: Ints


Message = Bound | Values | ProgramResult


class Worker:
    """A process that solves one integer program.

    Attributes:
        running: Whether more messages may come.
    """

    def __init__(self, task: Task) -> None:
        # The child finds the packages that the parent has found, however it did.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sbp_planner.choice.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.running = True
        threading.Thread(target=self._talk, args=(task,), daemon=True).start()

    def _talk(self, task: Task) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(task, self._process.stdin)
            self._process.stdin.close()
            while True:
                self._messages.put(pickle.load(self._process.stdout))
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            # The process is done, was ended, or died: nothing more comes.
            self._messages.put(None)

    def messages(self, wait_s: float = 0.0) -> list[Message]:
        """Return what has come since; wait for the first so long."""
        found: list[Message] = []
        try:
            while self.running:
                message = (
                    self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait()
                )
                wait_s = 0.0
                if message is None:
                    self.running = False
                else:
                    found.append(message)
        except queue.Empty:
            pass
        return found

    def end(self) -> None:
        """End the process, whatever it does."""
        self.running = False
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError:  # what was not read yet cannot be flushed
                pass


def main() -> None:
    """Solve the task on stdin."""
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may get between the messages
    task: Task = pickle.load(sys.stdin.buffer)

    def send(message: Any) -> None:
        pickle.dump(message, channel)
        channel.flush()

    result = solve_program(
        task.compact,
        time.monotonic() + task.seconds,
        task.gap,
        task.start,
        on_better=lambda values: send(Values(values)),
        on_bound=lambda bound: send(Bound(bound)),
    )
    send(result)


if __name__ == "__main__":
    # Pickles name the classes of the module by its own name, not of `__main__`.
    from sbp_planner.choice import worker

    worker.main()
