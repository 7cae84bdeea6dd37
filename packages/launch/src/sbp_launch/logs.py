"""What each rank of several processes writes, in a file of its own: `RUN/logs/rank_N.txt`.

Rank 0 also writes to the terminal. All others write there only, down to what libraries and crashes
print, save for their last words.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import TextIO

#: The folder of the logs in the run folder.
LOGS = "logs"


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
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        faulthandler.disable()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = self._before
        if self._saved is not None:
            for number, saved in zip((1, 2), self._saved, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            self._saved = None
        self._file.close()

    def last_words(self, text: str) -> None:
        """Write a text to the log, and to where this process wrote before."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        if self._saved is not None:
            os.write(self._saved[1], f"{text}\n".encode())


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
