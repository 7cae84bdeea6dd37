"""Run functions in a forked worker: a crash or a hang ends only the worker, and is a result.

The functions (trials) run an operator on shards that may not fit each other. One worker runs trials
one after the other and sends each result over a pipe. If it dies, or takes too long, this is the
verdict on its current trial, and a new worker continues with the next one. After a fork, the
arguments of trials need no copy. Results are pickled, and should be small. This needs a system with
`fork`; tensors have to be on the CPU.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import torch

from sbp_core.errors import SbpValueError

T = TypeVar("T")

#: Bytes that a worker may allocate in addition to the memory of its parent.
MEMORY_BYTES = 16 << 30

#: The format of the length before each result.
_LENGTH = struct.Struct("!Q")

#: Seconds after its time limit at which a trial ends itself, if its parent has died.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Completed(Generic[T]):
    """The trial finished, and returned a value."""

    value: T


@dataclass(frozen=True, slots=True)
class Raised:
    """The trial raised a Python exception: its class, and the first line of its message."""

    kind: str
    message: str

    def __str__(self) -> str:
        return f"raised {self.kind}: {self.message}"


@dataclass(frozen=True, slots=True)
class Crash:
    """The trial ended its process: `-signal`, or the exit code."""

    returncode: int

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed the process, if one did."""
        return signal.Signals(-self.returncode) if self.returncode < 0 else None

    def __str__(self) -> str:
        killer = self.signal
        if killer is None:
            return f"ended its process with exit code {self.returncode}"
        return f"was killed by {killer.name}"


@dataclass(frozen=True, slots=True)
class Timeout:
    """The trial was ended after `seconds`."""

    seconds: float

    def __str__(self) -> str:
        return f"took longer than {self.seconds:g} s"


Verdict = Completed[T] | Raised | Crash | Timeout


def run_isolated(
    trials: Sequence[Callable[[], T]], *, timeout_s: float, memory_bytes: int = MEMORY_BYTES
) -> list[Verdict[T]]:
    """Run trials in forked workers and return one verdict each.

    Args:
        trials: Each returns a value that can be pickled. They see the present memory of this
            process; their changes to it are lost.
        timeout_s: Seconds (> 0) that one trial may take.
        memory_bytes: Bytes that a worker may allocate beyond the memory of this process (Linux).

    Raises:
        SbpValueError: this system cannot fork, or the time limit is not positive.
    """
    return list(iter_isolated(trials, timeout_s=timeout_s, memory_bytes=memory_bytes))


def iter_isolated(
    trials: Sequence[Callable[[], T]], *, timeout_s: float, memory_bytes: int = MEMORY_BYTES
) -> Generator[Verdict[T], None, None]:
    """Yield the results of `run_isolated` one by one; closing the iterator ends the worker.

    Raises:
        SbpValueError: see `run_isolated`.
    """
    if not hasattr(os, "fork"):
        raise SbpValueError(
            "this system cannot fork a worker", todo="run without isolation, at your own risk"
        )
    if not timeout_s > 0:
        raise SbpValueError(f"a time limit of {timeout_s} s", accepted="more than 0")
    done = 0
    while done < len(trials):
        worker = _Worker(trials[done:], timeout_s, memory_bytes)
        try:
            worker.start()
            for verdict in worker.verdicts():
                done += 1
                yield verdict
        finally:
            worker.end()


class _Worker(Generic[T]):
    """A forked process that runs trials until it is done, dies or is killed."""

    def __init__(
        self, trials: Sequence[Callable[[], T]], timeout_s: float, memory_bytes: int
    ) -> None:
        self._trials = trials
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._pid: int | None = None
        self._returncode: int | None = None
        self._read, self._write = os.pipe()

    def start(self) -> None:
        """Fork the process. An interrupt is raised only after the fork, when `end` can kill it."""
        with _interrupts_held_back(), warnings.catch_warnings():
            # Python 3.12 warns of forking a process with threads (of PyTorch). The child takes no
            # lock that they may hold: it runs kernels on one thread and exits by `_exit`.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
            if self._pid == 0:
                _serve(self._trials, self._write, self._timeout_s, self._memory_bytes)
            os.close(self._write)

    def verdicts(self) -> Iterator[Verdict[T]]:
        """Yield a verdict for each trial, up to a trial that kills the worker."""
        for _ in self._trials:
            deadline = time.monotonic() + self._timeout_s
            try:
                (length,) = _LENGTH.unpack(self._bytes(_LENGTH.size, deadline))
                payload = self._bytes(length, deadline)
            except TimeoutError:
                # If another process also holds the pipe, the end of the worker does not close it.
                gone = self._wait(os.WNOHANG)
                yield Timeout(self._timeout_s) if gone is None else Crash(gone)
                return
            except EOFError:
                yield Crash(self._wait(0) or 0)
                return
            verdict: Completed[T] | Raised = pickle.loads(payload)
            yield verdict

    def _bytes(self, count: int, deadline: float) -> bytes:
        """Return `count` bytes from the pipe.

        Raises:
            TimeoutError: they have not arrived by the deadline.
            EOFError: the worker closed the pipe.
        """
        found = bytearray()
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        while len(found) < count:
            rest_s = deadline - time.monotonic()
            if rest_s <= 0 or not poll.poll(rest_s * 1e3):
                raise TimeoutError
            part = os.read(self._read, min(count - len(found), 1 << 20))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def _wait(self, options: int) -> int | None:
        """Return the exit status of the worker; None if it is alive."""
        if self._returncode is None and self._pid is not None:
            pid, status = os.waitpid(self._pid, options)
            if pid:
                self._returncode = os.waitstatus_to_exitcode(status)
        return self._returncode

    def end(self) -> None:
        """Kill the worker if it still lives, reap it, and close the pipe."""
        os.close(self._read)
        if self._pid is None:  # it was never forked
            os.close(self._write)
        elif self._wait(os.WNOHANG) is None:
            os.kill(self._pid, signal.SIGKILL)
            self._wait(0)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Delay SIGINT until the end of the context.

    Python drops exceptions of a signal handler inside functions that run at a fork
    (`os.register_at_fork`), so Ctrl-C would be lost there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run on the main thread only
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _serve(
    trials: Sequence[Callable[[], T]], write: int, timeout_s: float, memory_bytes: int
) -> NoReturn:
    """Run trials in the child; never return, and run no exit handlers of the parent."""
    code = 1
    try:
        _quieten()
        _limit(memory_bytes)
        torch.set_num_threads(1)  # a fork does not copy the other threads of the pool
        for trial in trials:
            # If the parent dies, this ends a trial that hangs.
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
            _send(write, _outcome(trial))
        code = 0
    finally:
        os._exit(code)


def _outcome(trial: Callable[[], T]) -> bytes:
    """Run a trial and return its pickled verdict."""
    verdict: Completed[T] | Raised
    try:
        verdict = Completed(trial())
        return pickle.dumps(verdict)
    except Exception as error:  # any exception of a trial is its verdict
        lines = str(error).splitlines() or [""]
        return pickle.dumps(Raised(type(error).__name__, lines[0]))


def _send(write: int, payload: bytes) -> None:
    rest = memoryview(_LENGTH.pack(len(payload)) + payload)
    while rest:
        rest = rest[os.write(write, rest) :]


def _quieten() -> None:
    """Keep the child from printing, warning, and finalising objects of its parent."""
    gc.freeze()  # only the parent finalises its garbage
    faulthandler.disable()
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until `_exit`
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _limit(memory_bytes: int) -> None:
    """Allow no core dump, and limit further allocations to `memory_bytes`."""
    import resource  # is not there on systems without fork

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # no such file, or the limit is already tighter
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
