"""What each rank of several processes writes, in a file of its own: `RUN/logs/rank_N.txt`.

Rank 0 also writes to the terminal. All others write there only, down to what libraries and crashes
print, save for their last words. A log begins with who writes it; messages of `logging`, to which
warnings go, too, have the time.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO

from sbp_launch.run.folder import LOGS

#: How messages of `logging` are written: to a log, and by rank 0 to the terminal.
_TIMED = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN = "%(levelname)s %(name)s: %(message)s"


def log_path(folder: Path, rank: int) -> Path:
    """Return where a rank logs."""
    return folder / LOGS / f"rank_{rank}.txt"


class RankLog:
    """The output of this process goes to its log, inside the `with` block.

    Args:
        folder: Of the run.
        rank: Of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path, self.rank = log_path(folder, rank), rank
        self._before = (sys.stdout, sys.stderr)
        self._saved: tuple[int, int] | None = None

    def __enter__(self) -> RankLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        if self.rank == 0:
            sys.stdout, sys.stderr = (_Both(stream, self._file) for stream in self._before)
        else:
            for stream in self._before:
                stream.flush()
            self._saved = (os.dup(1), os.dup(2))
            for number in (1, 2):
                os.dup2(self._file.fileno(), number)
        # Where a library crashes, the log says in which call.
        faulthandler.enable(self._file)
        self._handlers = logging.root.handlers[:]
        logging.root.handlers[:] = [_handler(self._file, _TIMED)]
        if self.rank == 0:
            logging.root.addHandler(_handler(self._before[1], _PLAIN))
        logging.captureWarnings(True)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._file.write(
            f"{now} rank {self.rank}: host {socket.gethostname()}, process {os.getpid()}\n"
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        faulthandler.disable()
        logging.captureWarnings(False)
        logging.root.handlers[:] = self._handlers
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = self._before
        if self._saved is not None:
            for number, saved in zip((1, 2), self._saved, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            self._saved = None
        self._file.close()

    def note(self, text: str) -> None:
        """Write a text to the log alone."""
        sys.stdout.flush()
        self._file.write(text)

    def last_words(self, text: str) -> None:
        """Write a text to the log, and to where this process wrote before."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        if self._saved is not None:
            with suppress(OSError):  # nobody may be there to read it
                os.write(self._saved[1], f"{text}\n".encode())


def _handler(stream: TextIO, form: str) -> logging.Handler:
    """Return what writes messages to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(form))
    return handler


class _Both(io.TextIOBase):
    """Writes to a stream, and to a log; otherwise the stream."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override] # an attribute there
        return self._stream.encoding
