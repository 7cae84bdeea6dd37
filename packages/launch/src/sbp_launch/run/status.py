"""What a run writes when SIGUSR2 asks it what it is at: `RUN/logs/status_RANK.txt`.

    2026-11-23 17:20:04+00:00 process 0 of 2: host node1, pid 4711
    120 steps are done
    rank 0, thread compute: at down.addmm@0(B), micro-batch 0; 6 of 20 firings of the step are done
      is in boxing: all-reduce
    ...

Then come the Python stacks of all threads. Each process of a run writes a file of its own and goes
on; what is asked later is written behind it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from sbp_core.runtime import Session
from sbp_launch.world import World

#: SIGUSR1 asks a run to stop, as Slurm does. Windows lacks both.
_NAME = "SIGUSR2"


def outlive_status_signal() -> None:
    """Let SIGUSR2, which would end the program, do nothing until a `StatusSignal` hears it.

    Who asks a run may do so when some of its processes have not come to their step yet.
    """
    number = getattr(signal, _NAME, None)
    if number is not None and signal.getsignal(number) == signal.SIG_DFL:
        signal.signal(number, _not_begun)


def _not_begun(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):
        os.write(2, b"sbp-train: there is nothing to tell yet, or no more\n")


class StatusSignal:
    """Hears SIGUSR2 inside its `with` block, if that is in the main thread.

    A thread of its own writes: the main thread may be in a call that never returns. One that the
    program ignores stays ignored.

    Args:
        folder: Where to write, such as `RUN/logs`; made when something is written.
        world: This process among those of the run.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.path = folder / f"status_{world.rank}.txt"
        self.world = world
        #: What is asked, once there is one.
        self.session: Session | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        number = getattr(signal, _NAME, None)
        is_main = threading.current_thread() is threading.main_thread()
        if number is None or not is_main or signal.getsignal(number) in (signal.SIG_IGN, None):
            return self
        self._number: int = number
        self._read, self._written = socket.socketpair()
        self._written.setblocking(False)
        self._before: Any = signal.signal(number, lambda number, frame: None)
        signal.siginterrupt(number, False)
        # The signal itself writes its number here, whatever the main thread is at.
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
        signal.signal(self._number, self._before)
        self._written.close()
        self._thread.join()
        self._read.close()
        self._thread = None

    def _serve(self) -> None:
        while number := self._read.recv(1):
            if number[0] != self._number:  # another signal, which has a handler of its own
                continue
            try:
                self.write()
                told = f"what its ranks are at: {self.path}"
            except Exception as error:  # whatever it is, the run goes on
                told = f"what its ranks are at cannot be written: {error}"
            with suppress(OSError):
                # Past Python's buffers: the main thread may hold their lock.
                os.write(2, f"sbp-train: {told}\n".encode())

    def write(self) -> None:
        """Append what each rank of this process is at, and the stacks of its threads.

        Raises:
            OSError: it cannot be written.
        """
        session = self.session
        lines = ["there is no session yet, or no more"] if session is None else session.status()
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        process = f"process {self.world.rank} of {self.world.size}"
        host = f"host {socket.gethostname()}, pid {os.getpid()}"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {process}: {host}\n")
            file.writelines(f"{line}\n" for line in lines)
            file.write("stacks:\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
