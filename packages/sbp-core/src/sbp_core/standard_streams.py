"""The standard streams of a command: characters they lack, readers that left, disks that are full.

with standard_streams("sbp-plan"):                       prints, and nothing else
with standard_streams("sbp-train", essential=False):     goes on without its output
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

#: Exit code of a command whose output cannot be written.
_FAILED = 1

#: Exit code where the reader of a pipe has left, as of a program that SIGPIPE has ended.
BROKEN_PIPE = 141


@contextmanager
def standard_streams(name: str, *, essential: bool = True) -> Iterator[None]:
    """Print in the block whatever the streams can show, and tell clearly if they cannot be written.

    A character that the encoding lacks becomes `?`. The standard error is never essential.

    Args:
        name: Of the command, for messages.
        essential: Whether the command ends when its standard output cannot be written: quietly with
            exit code 141 if the reader of a pipe has left, else with a message and exit code 1. If
            False, it says so once, and goes on.

    Raises:
        SystemExit: the standard output is essential and cannot be written.
    """
    before = sys.stdout, sys.stderr

    def end(error: OSError) -> None:
        if out_stream is not None:
            _silence(out_stream)
        if essential and isinstance(error, BrokenPipeError):
            raise SystemExit(BROKEN_PIPE)
        more = "" if essential else "; it goes on, and prints nothing more"
        why = error.strerror or error
        sys.stderr.write(f"{name}: the standard output cannot be written: {why}{more}\n")
        if essential:
            raise SystemExit(_FAILED)

    out_stream, error_stream = before
    out = lenient(_opened(out_stream, 1), end)
    errors = _opened(error_stream, 2)
    sys.stderr = lenient(errors, lambda _: _silence(errors))
    sys.stdout = out
    try:
        if out_stream is None:
            end(OSError(0, "it is closed"))
        yield
        out.flush()
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def lenient(stream: TextIO, on_lost: Callable[[OSError], None]) -> TextIO:
    """Return a stream that writes what another can show.

    Args:
        stream: The other one.
        on_lost: Called once, when it cannot be written. After that, nothing more is.
    """
    return cast(TextIO, _Lenient(stream, on_lost))


class _Lenient:
    """See `lenient`. Otherwise the stream that it is made of."""

    def __init__(self, stream: TextIO, on_lost: Callable[[OSError], None]) -> None:
        self._stream, self._on_lost, self._is_lost = stream, on_lost, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._try(lambda: self._stream.write(text))
        except UnicodeEncodeError as error:
            shown = text.encode(error.encoding, "replace").decode(error.encoding)
            self._try(lambda: self._stream.write(shown))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if not self._is_lost:
            try:
                call()
            except OSError as error:
                self._is_lost = True
                self._on_lost(error)


def _opened(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream, or, where its descriptor is closed, one that shows nothing in its place.

    Otherwise the next file that is opened would have that descriptor.
    """
    if stream is not None:
        return stream
    nothing = os.open(os.devnull, os.O_WRONLY)
    if nothing != number:
        os.dup2(nothing, number)
        os.close(nothing)
    return Path(os.devnull).open("w", encoding="utf-8")


def _silence(stream: TextIO) -> None:
    """Let a stream lead nowhere: what it has buffered would fail again when Python ends."""
    with suppress(OSError, ValueError, AttributeError):  # one of a test has no descriptor
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
