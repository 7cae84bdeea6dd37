"""Which plugin an exception comes from: by the frames of its own code in the traceback.

Our stack says nothing to a plugin's author; the last lines of the plugin that were running do.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

from sbp_core.errors import PluginError
from sbp_core.plugins.registry import PluginEntry

#: Packages that call plugins: they stand in every traceback.
CALLERS = frozenset({"sbp_core", "sbp_aten", "sbp_torch", "sbp_launch"})

#: Most lines of a plugin's code that a message shows.
_MOST_LINES = 3


def blame(error: BaseException, entries: Iterable[PluginEntry]) -> PluginError | None:
    """Return what a plugin did wrong, or None if none of its code was running.

    Args:
        error: What was raised, with its traceback.
        entries: The plugins that were in use. The one whose code ran last is to blame.
    """
    owners = {
        package: entry
        for entry in entries
        if entry.factory is not None
        and (package := entry.factory.build.partition(":")[0].partition(".")[0]) not in CALLERS
    }
    frames = [(package, line) for package, line in _lines(error) if package in owners]
    if not frames:
        return None
    guilty = frames[-1][0]
    entry = owners[guilty]
    own = [line for package, line in frames if package == guilty]
    return PluginError(
        f"{entry.kind} {entry.name!r} of {entry.distribution} {entry.version} raised "
        f"{reason(error)}",
        where=own[: -_MOST_LINES - 1 : -1],
        todo="mend the plugin, or what it was given; HYDRA_FULL_ERROR=1 shows the whole traceback",
    )


def place(error: BaseException, package: str) -> str:
    """Return `file:line` of the last line of a package that ran, or that cannot be read, or `""`.

    >>> place(ValueError("never raised"), "json")
    ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}"
    lines = [line for owner, line in _lines(error) if owner == package]
    return lines[-1].partition(",")[0] if lines else ""


def reason(error: BaseException) -> str:
    """Return an exception in one line."""
    # The text of a syntax error repeats its file and line.
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(file: str) -> str:
    """Return a path as one reads it: relative, if it lies below the working folder."""
    path = Path(file)
    here = Path(os.curdir).absolute()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def _lines(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the top package of every frame, and its file, line, function and code."""
    step: TracebackType | None = error.__traceback__
    summary = traceback.extract_tb(step)
    for frame in summary:
        assert step is not None, "one summary for each step"
        package = str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        code = f": {frame.line}" if frame.line else ""
        yield package, f"{shown(frame.filename)}:{frame.lineno}, in {frame.name}{code}"
        step = step.tb_next
