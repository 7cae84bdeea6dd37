"""Report the status of a running job, on SIGUSR1, SIGUSR2 or a Unix socket.

On a signal, each process appends a report to `RUN/logs/status_RANK.txt` and keeps running:

    2026-11-23 17:20:04+00:00 process 0 of 2: host node1, pid 4711
    120 steps are done
    rank 0, thread compute: at down.addmm@0(B), micro-batch 0; 6 of 20 firings of the step are done
      is in boxing: all-reduce
    ...

(A firing is one run of an actor, such as a segment of operators.) The report ends with the Python
stack of every thread. The other lines also go to stderr, and so into the log of the run.

`sbp-watch RUN` connects to the socket `RUN/logs/status_RANK.sock` of each process and gets the same
lines without the stacks. One background thread serves signals and socket; it sleeps until a request
arrives, so it does not slow down the run.

Slurm sends SIGUSR1 when the time limit is near (see `stopping`), so in its jobs only SIGUSR2
requests a report.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from sbp_core.errors import SbpError
from sbp_core.runtime import Session
from sbp_launch.world import World, is_slurm_job

#: Longest path, in bytes, that surely fits into the address of a Unix socket.
_MOST_BYTES = 100

#: Timeout of a status request in seconds, on both sides.
_WAIT_S = 2.0


def listen(path: Path) -> socket.socket | None:
    """Return a listening Unix socket at a path, for this user only.

    A file of an earlier run is replaced. None if sockets are not possible, as on some network file
    systems, or on Windows.
    """
    if not hasattr(socket, "AF_UNIX"):
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with _address(path) as address:
            made.bind(address)
        path.chmod(0o600)
        made.listen()
    except OSError:
        made.close()
        return None
    return made


def answer(listener: socket.socket, lines: list[str]) -> None:
    """Accept one connection and send it some lines; ignore a client that disconnects."""
    with suppress(OSError), listener.accept()[0] as asking:
        asking.settimeout(_WAIT_S)
        asking.sendall("\n".join(lines).encode())


def ask(path: Path) -> list[str]:
    """Request the status lines of the process at a socket.

    Raises:
        SbpError: it does not answer.
    """
    try:
        with _address(path) as address, socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_WAIT_S)
            asking.connect(address)
            parts = list(iter(lambda: asking.recv(1 << 16), b""))
    except OSError as error:
        raise SbpError(
            f"no answer: {error.strerror or error}",
            where=str(path),
            accepted="a process of this machine that has not ended",
        ) from error
    return b"".join(parts).decode().splitlines()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    """Yield a short address for the path of a socket, even if the names of its folders are long."""
    if len(os.fsencode(path)) <= _MOST_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


#: Byte in the wake-up pipe that stands for no signal.
_NO_SIGNAL = b"\0"


def status_signals() -> tuple[int, ...]:
    """Return the signals that request a status report; Windows has none of them."""
    names = ("SIGUSR2",) if is_slurm_job() else ("SIGUSR1", "SIGUSR2")
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def ignore_status_signals() -> None:
    """Ignore status signals until a `StatusSignal` handles them; by default they kill the process.

    A request may come before some processes of the run have reached their first step.
    """

    def not_begun(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"sbp-train: no status is available now\n")

    for number in status_signals():
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, not_begun)


class StatusSignal:
    """Writes a report when a status signal arrives, inside its `with` block in the main thread.

    A background thread writes it, because the main thread may be blocked. A signal that the program
    ignores stays ignored.

    Args:
        folder: Folder of the reports, such as `RUN/logs`; created for the first one.
        world: The rank of this process, and the number of processes.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.path = folder / f"status_{world.rank}.txt"
        self.world = world
        self.live_path = folder / f"status_{world.rank}.sock"
        self._session: Session | None = None
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._before: dict[int, Any] = {}

    @property
    def session(self) -> Session | None:
        """The session to report on. Setting the first one opens the socket."""
        return self._session

    @session.setter
    def session(self, session: Session | None) -> None:
        self._session = session
        if self._thread is not None and self._listener is None:
            self._listener = listen(self.live_path)
            self._written.send(_NO_SIGNAL)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in status_signals():
                before = signal.getsignal(number)
                if before not in (signal.SIG_IGN, None):
                    self._before[number] = before
        if not self._before:
            return self
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        for number in self._before:
            signal.signal(number, lambda number, frame: None)
            signal.siginterrupt(number, False)
        # The C handler writes the signal's number here, even if the main thread is blocked.
        self._wakeup_before = signal.set_wakeup_fd(
            self._written.fileno(), warn_on_full_buffer=False
        )
        self._thread = threading.Thread(target=self._serve, name="sbp status", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._thread is None:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
        self._written.close()
        self._thread.join()
        self._read.close()
        if self._listener is not None:
            self._listener.close()
            self.live_path.unlink(missing_ok=True)
            with suppress(OSError):  # the folder holds something else
                self.live_path.parent.rmdir()
            self._listener = None
        self._thread = None

    def _serve(self) -> None:
        with selectors.DefaultSelector() as asked:
            asked.register(self._read, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in asked.select()]
                if self._listener is not None and self._listener in ready:
                    self._answer(self._listener)
                if self._read in ready:
                    number = self._read.recv(1)
                    if not number:
                        return
                    if number == _NO_SIGNAL and self._listener is not None:
                        asked.register(self._listener, selectors.EVENT_READ)
                    if number[0] in self._before:  # other signals have their own handlers
                        self._report()

    def _answer(self, listener: socket.socket) -> None:
        """Send the status lines to a client that has connected."""
        try:
            lines = [self._head(), *self._lines()]
        except Exception as error:  # an error of reporting must not end the run
            lines = [self._head(), f"the state of its ranks cannot be read: {error}"]
        answer(listener, lines)

    def _report(self) -> None:
        """Write a report, and print it to stderr."""
        try:
            # Lists, such as of registers, are in the file only.
            written = self.write()
            lines = [one for one in written if not one.startswith("    ") and one[-1:] != ":"]
            told = [f"the state of its ranks: {self.path}", *lines]
        except Exception as error:  # an error of reporting must not end the run
            told = [f"the state of its ranks cannot be written: {error}"]
        with suppress(OSError):
            # Bypass Python's buffers: the main thread may hold their lock.
            os.write(2, "".join(f"sbp-train: {line}\n" for line in told).encode())

    def _lines(self) -> Sequence[str]:
        session = self.session
        return ["no session is open now"] if session is None else session.status()

    def _head(self) -> str:
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        process = f"process {self.world.rank} of {self.world.size}"
        return f"{now} {process}: host {socket.gethostname()}, pid {os.getpid()}"

    def write(self) -> Sequence[str]:
        """Append the status of each rank of this process, and the stacks of its threads.

        Returns:
            The lines without the stacks.

        Raises:
            OSError: it cannot be written.
        """
        lines = self._lines()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self._head()}\n")
            file.writelines(f"{line}\n" for line in lines)
            file.write("stacks:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
        return lines
