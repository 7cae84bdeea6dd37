"""Make one mistake, and judge its answer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from forked import run_forked
from mistakes.table import Mistake
from sbp_core.testing.forked_programs import ForkedPrograms

#: The modules that commands import before they check their settings.
APP = ("sbp_launch.apps.hydra_app", "sbp_launch.settings.check", "sbp_launch.apps.plan")

_IMPORTED = "torch imported\n"

#: Prints at exit whether PyTorch was imported: mistakes should be detected without it if possible.
_PROGRAM = """\
import atexit, runpy, sys
atexit.register(lambda: sys.stderr.write("torch imported\\n" * ("torch" in sys.modules)))
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a mistake.

    Args:
        text: The printed text, standard output before standard error.
        code: Exit code.
        seconds: Duration.
        faults: The faults of the answer.
    """

    text: str
    code: int
    seconds: float
    faults: tuple[str, ...]


def make_without_torch(mistake: Mistake, folder: Path, programs: ForkedPrograms) -> Answer:
    """Make a mistake in a fork of a process that has imported only the app; see `APP`."""
    environment = _environment(mistake, folder)
    began = time.perf_counter()
    done = programs.run(_PROGRAM, mistake.command, folder, environment)
    return _judged_process(mistake, done, time.perf_counter() - began)


def make(mistake: Mistake, folder: Path) -> Answer:
    """Make a mistake in a prepared folder, in a new process."""
    environment = _environment(mistake, folder)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *mistake.command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return _judged_process(mistake, done, time.perf_counter() - began)


def make_in_fork(mistake: Mistake, folder: Path) -> Answer:
    """Make a mistake that needs PyTorch, in a fork of this process; see `forked`."""
    began = time.perf_counter()
    plugins = str(folder / mistake.plugins) if mistake.plugins else ""
    code, text = run_forked(mistake.command, folder, plugins)
    return _judged(mistake, text, code, time.perf_counter() - began, imported=True)


def _environment(mistake: Mistake, folder: Path) -> dict[str, str]:
    paths = [str(folder / mistake.plugins) if mistake.plugins else "", os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _judged_process(
    mistake: Mistake, done: subprocess.CompletedProcess[str], seconds: float
) -> Answer:
    imported = done.stderr.endswith(_IMPORTED)
    text = done.stdout + done.stderr.removesuffix(_IMPORTED)
    return _judged(mistake, text, done.returncode, seconds, imported=imported)


def _judged(mistake: Mistake, text: str, code: int, seconds: float, *, imported: bool) -> Answer:
    faults = []
    if code != mistake.code:
        faults.append(f"exit code {code}, not {mistake.code}")
    if "Traceback (most recent call last)" in text:
        faults.append("a traceback")
    faults += [f"does not say {word!r}" for word in mistake.says if word not in text]
    if imported and not mistake.imports_torch:
        faults.append("PyTorch was imported first")
    return Answer(text=text, code=code, seconds=seconds, faults=tuple(faults))
