"""Which plugin an exception comes from: by the frames of its own code in the traceback.

Our stack says nothing to a plugin's author; the last lines of the plugin that were running do.
Where a plugin is called, `PluginEntry.called` knows which one it is; frames tell it elsewhere.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from sbp_core.errors import PluginError

if TYPE_CHECKING:
    from sbp_core.plugins.registry import PluginEntry

#: Packages that call plugins: they stand in every traceback.
CALLERS = frozenset({"sbp_core", "sbp_aten", "sbp_torch", "sbp_launch"})

#: Most lines of a plugin's code that a message shows.
_MOST_LINES = 3


def blame(error: BaseException, entries: Iterable[PluginEntry]) -> PluginError | None:
    """Return what a plugin did wrong, or None if none of its code was running.

    Args:
        error: What was raised, with its traceback.
        entries: The plugins that were in use. The one whose code ran last is to blame; if that code
            may be of several of one package, the message names them all.
    """
    known = [entry for entry in entries if entry.package and entry.package not in CALLERS]
    packages = {entry.package for entry in known}
    frames = [module for module, _ in _lines(error) if module.partition(".")[0] in packages]
    if not frames:
        return None
    guilty = [entry for entry in known if entry.package == frames[-1].partition(".")[0]]
    for module in reversed(frames):
        if found := [entry for entry in guilty if entry.module == module]:
            guilty = found
            break
    first = guilty[0]
    named = sorted({f"{entry.kind} {entry.name!r}" for entry in guilty})
    who = f"{' or '.join(named)} of {first.distribution} {first.version}"
    return PluginError(f"{who} raised {reason(error)}", where=own_lines(error, first), todo=MEND)


#: What to do about a plugin that has raised an error that is not one of sbp's.
MEND = "mend the plugin, or what it was given; HYDRA_FULL_ERROR=1 shows the whole traceback"


def own_lines(error: BaseException, entry: PluginEntry) -> list[str]:
    """Return the last lines of a plugin's own code that ran, the last one first."""
    lines = [
        line
        for module, line in _lines(error)
        if module.partition(".")[0] == entry.package and not line.startswith("<")  # generated
    ]
    return lines[: -_MOST_LINES - 1 : -1]


def place(error: BaseException, package: str) -> str:
    """Return `file:line` of the last line of a package that ran, or that cannot be read, or `""`.

    >>> place(ValueError("never raised"), "json")
    ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}"
    lines = [line for module, line in _lines(error) if module.partition(".")[0] == package]
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
    """Yield the module of every frame, and its file, line, function and code."""
    step: TracebackType | None = error.__traceback__
    summary = traceback.extract_tb(step)
    for frame in summary:
        assert step is not None, "one summary for each step"
        module = str(step.tb_frame.f_globals.get("__name__", ""))
        code = f": {frame.line}" if frame.line else ""
        yield module, f"{shown(frame.filename)}:{frame.lineno}, in {frame.name}{code}"
        step = step.tb_next
