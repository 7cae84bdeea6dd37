"""Which line of the user's code something comes from, past the frames of torch and this package."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_OURS = Path(__file__).parent.parent
_FOREIGN = (str(Path(torch.__file__).parent), str(_OURS), "<")

#: Programs for tests are written as users write theirs.
_PROGRAMS = str(_OURS / "testing")

#: Where Python's own library lies; what is installed may lie in a folder below.
_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")

#: Where PyTorch computes in Python what users could.
_WRITTEN_OUT = tuple(
    str(Path(torch.__file__).parent / part)
    for part in ("functional.py", "nn/functional.py", "nn/utils", "distributions")
)

#: What PyTorch calls for every op: the line of interest is the one that called the op.
_HANDLERS = ("__torch_function__", "__torch_dispatch__")


def is_users(code: CodeType) -> bool:
    """Whether code is the user's: not torch's, Python's or ours, nor made at run time."""
    return _is_users(code.co_filename, code.co_name)


@lru_cache(maxsize=4096)
def _is_users(file: str, name: str) -> bool:
    if name in _HANDLERS:
        return False
    if file.startswith(_FOREIGN) and not file.startswith(_PROGRAMS):
        return False
    return not file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED)


def user_line() -> str:
    """Return `file:line` of the innermost frame of the user's code that runs now; or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_frame(error: BaseException) -> str:
    """Return `file:line` of the deepest frame of the user's code in a traceback; or nothing."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code):
            found = f"{short(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def library_call(error: BaseException) -> str:
    """Return the function of PyTorch that the user called and that raised, `f (FILE:LINE)`.

    Only functions that are written in Python and compute something; else nothing.
    """
    found = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code):
            found = ""
        elif code.co_filename.startswith(_WRITTEN_OUT) and code.co_name != "forward":
            found = f"{code.co_name} ({short(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def definition(kind: type) -> str:
    """Return `file:line` of where a class is written; or nothing, if its text is not at hand."""
    try:
        file, (_, line) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return ""
    return f"{short(file)}:{line}" if file else ""


@lru_cache(maxsize=4096)
def short(path: str) -> str:
    """Return a path without the folders that only this machine has."""
    parts = Path(path).parts
    for marker in ("site-packages", "src"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    return "/".join(parts[-2:])
