"""Which line of the user's code something comes from. Knows where torch and this package lie."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def is_users(file: str) -> bool:
    """Whether a source file is the user's: neither torch's, nor ours, nor made at run time."""
    return not file.startswith(_FOREIGN) and "contextlib" not in file


def user_line() -> str:
    """Return `file:line` of the innermost frame of the user's code that runs now; or nothing."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f"{short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def user_frame(error: BaseException) -> str:
    """Return `file:line` of the deepest frame of the user's code in a traceback; or nothing."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if is_users(name):
            found = f"{short(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def short(path: str) -> str:
    """Return a path without the folders that only this machine has."""
    parts = Path(path).parts
    for marker in ("site-packages", "src"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    return "/".join(parts[-2:])
