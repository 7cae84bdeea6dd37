"""The outputs of commands: text for any encoding, and what to do when an output is lost."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["legible", "standard_output"]

#: The name of the error handler of `str.encode` that writes what an encoding lacks in ASCII.
_LEGIBLE = "sbp.legible"

#: Signs that commands draw with, for outputs that lack them. What is not here is escaped.
_IN_ASCII = str.maketrans("─│┬└┘·…′×→≤≥▁▂▃▄▅▆▇█▢²µ", "-|+++..'x><>______##o2u", "")

#: The exit code of a command whose reader went away, as shells have it: 128 + SIGPIPE.
_READER_GONE = 141


def legible(text: str, stream: TextIO) -> str:
    """Return a text that a stream can take: what its encoding lacks is drawn in ASCII, or escaped.

    Args:
        text: The text.
        stream: Where it goes; one without an encoding takes all.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _LEGIBLE).decode(encoding)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Answer `str.encode`, as `codecs.register_error` says."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_IN_ASCII)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_LEGIBLE, _in_ascii)


@contextmanager
def standard_output(command: str, *, outlives: bool = False) -> Iterator[None]:
    """Let a command write in this block to outputs of any encoding, also if they are lost.

    Descriptors 0, 1 and 2 that are closed are opened on /dev/null. Otherwise a file that is opened
    later would get such a number, and child processes would write to it.

    Args:
        command: The name of the command.
        outlives: Whether the command goes on when its output is lost, because its work is not what
            it prints.

    Raises:
        SystemExit: the output takes no more, and the command does not go on without it. The code is
            141 if the reader of a pipe went away (`| head`), else 1, and says why.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one

    def lost(error: OSError) -> None:
        gone = isinstance(error, BrokenPipeError)
        if outlives or not gone:
            told = f"{command}: no more can be written to the output: {error.strerror}"
            sys.stderr.write(f"{told}{'; the work goes on without it' * outlives}\n")
        if not outlives:
            raise SystemExit(_READER_GONE if gone else 1)

    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, lost), _lasting(sys.stderr, lambda error: None)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # also of a command that exits inside of the block
        finally:
            sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None, lost: Callable[[OSError], None]) -> TextIO:
    """Return a stream to the same file that takes every character, and calls when it is lost."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    try:
        stream.flush()
        number = stream.fileno()
    except (OSError, ValueError):  # one of a notebook or a test, which has no file
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, lost)),
        encoding=stream.encoding,
        errors=_LEGIBLE,
        line_buffering=stream.isatty() or stream is sys.stderr,
    )


class _Lasting(io.FileIO):
    """A file of the process that leads to nothing from its first error on.

    Args:
        number: Its descriptor, which stays open.
        lost: Called with that error.
    """

    def __init__(self, number: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._lost = lost

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.fileno())
            os.close(nothing)
            self._lost(error)
            return memoryview(data).nbytes
