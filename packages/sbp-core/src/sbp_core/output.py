"""Robust output of commands: text for any encoding, and the handling of a closed or full output."""

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

#: The name of the error handler of `str.encode` that replaces missing characters by ASCII.
_LEGIBLE = "sbp.legible"

#: Replacements for the signs that commands draw with. All other characters are escaped.
_IN_ASCII = str.maketrans("─│┬└┘·…′×→≤≥▁▂▃▄▅▆▇█▢²µ", "-|+++..'x><>______##o2u", "")

#: The exit code of a command whose reader has closed the pipe, as in shells: 128 + SIGPIPE.
_READER_GONE = 141


def legible(text: str, stream: TextIO) -> str:
    """Return a text that a stream can encode: missing characters are drawn in ASCII, or escaped.

    Args:
        text: The text.
        stream: The stream; one without an encoding accepts all characters.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _LEGIBLE).decode(encoding)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement and the next position, as `codecs.register_error` requires."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end].translate(_IN_ASCII)
    return lacking.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(_LEGIBLE, _in_ascii)


@contextmanager
def standard_output(command: str, *, outlives: bool = False) -> Iterator[None]:
    """Let a command write in this block to outputs of any encoding, even if they are lost.

    Closed descriptors 0, 1 and 2 are opened on /dev/null. Otherwise a file that is opened later
    would get such a number, and child processes would write to it.

    Args:
        command: The name of the command.
        outlives: Whether the command continues without its output, which is not its main work.

    Raises:
        SystemExit: the output is lost, and the command does not continue without it. The code is
            141 if the reader has closed a pipe (`| head`), else 1, with a message.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one

    def lost(error: OSError) -> None:
        gone = isinstance(error, BrokenPipeError)
        if outlives or not gone:
            told = f"{command}: the output can no longer be written: {error.strerror}"
            sys.stderr.write(f"{told}{'; the command continues without it' * outlives}\n")
        if not outlives:
            raise SystemExit(_READER_GONE if gone else 1)

    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lasting(sys.stdout, lost), _lasting(sys.stderr, lambda error: None)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()  # even if the command exits inside the block
        finally:
            sys.stdout, sys.stderr = before


def _lasting(stream: TextIO | None, lost: Callable[[OSError], None]) -> TextIO:
    """Return a stream to the same file that accepts every character; `lost` is called on loss."""
    if stream is None:
        return Path(os.devnull).open("w", encoding="utf-8")
    try:
        stream.flush()
        number = stream.fileno()
    except (OSError, ValueError):  # the stream of a notebook or a test, which has no file
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Lasting(number, lost)),
        encoding=stream.encoding,
        errors=_LEGIBLE,
        line_buffering=stream.isatty() or stream is sys.stderr,
    )


class _Lasting(io.FileIO):
    """A file of the process that discards all writes from its first error on.

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
