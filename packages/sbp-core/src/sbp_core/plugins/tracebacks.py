"""Attribution of exceptions to plugins, by the frames of the plugin's code in the traceback.

Our frames do not help the author of a plugin; the last lines of the plugin that ran do. Where a
plugin is called, `PluginEntry.called` knows which one it is; elsewhere the frames identify it.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

#: Packages that call plugins: they are in every traceback.
CALLERS = frozenset({"sbp_core", "sbp_aten", "sbp_torch", "sbp_launch"})

#: Most lines of a plugin's code that a message shows.
_MOST_LINES = 3


#: Advice for a plugin that has raised an error that is not of sbp.
MEND = "correct the plugin, or its input; HYDRA_FULL_ERROR=1 shows the whole traceback"


def own_lines(error: BaseException, package: str) -> list[str]:
    """Return the last executed lines of a package's own code, the last one first."""
    lines = [
        line
        for module, line in lines_of(error)
        if module.partition(".")[0] == package and not line.startswith("<")  # generated
    ]
    return lines[: -_MOST_LINES - 1 : -1]


def place(error: BaseException, package: str) -> str:
    """Return `file:line` of the last line of a package that ran or failed to parse, or `""`.

    >>> place(ValueError("never raised"), "json")
    ''
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{shown(error.filename)}:{error.lineno}"
    lines = [line for module, line in lines_of(error) if module.partition(".")[0] == package]
    return lines[-1].partition(",")[0] if lines else ""


def reason(error: BaseException) -> str:
    """Return an exception in one line."""
    # The text of a syntax error repeats its file and line.
    text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(file: str) -> str:
    """Return a path for messages: relative, if it is below the working folder."""
    path = Path(file)
    here = Path(os.curdir).absolute()
    return str(path.relative_to(here)) if path.is_relative_to(here) else file


def lines_of(error: BaseException) -> Iterator[tuple[str, str]]:
    """Yield the module of every frame, and its file, line, function and code."""
    step: TracebackType | None = error.__traceback__
    summary = traceback.extract_tb(step)
    for frame in summary:
        assert step is not None, "one summary for each step"
        module = str(step.tb_frame.f_globals.get("__name__", ""))
        code = f": {frame.line}" if frame.line else ""
        yield module, f"{shown(frame.filename)}:{frame.lineno}, in {frame.name}{code}"
        step = step.tb_next
