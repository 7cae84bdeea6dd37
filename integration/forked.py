"""Commands of ours in copies of this process: what one takes to import PyTorch is taken once.

For tests that run many commands. Only with one thread for each process (`OMP_NUM_THREADS=1`): pools
of threads do not survive a fork.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from sbp_core.signatures import installed_rules

#: Modules of the commands that take PyTorch.
COMMANDS = {
    "sbp-train": "sbp_launch.apps.train",
    "sbp-plan": "sbp_launch.apps.plan",
    "sbp-checkpoint": "sbp_launch.checkpoint.command.app",
    "sbp-watch": "sbp_launch.apps.watch",
}


def can_fork() -> bool:
    """Return whether commands may run so."""
    return hasattr(os, "fork") and os.environ.get("OMP_NUM_THREADS") == "1"


def run_forked(
    command: Sequence[str], folder: Path, plugins: str = "", timeout_s: int = 0
) -> tuple[int, str]:
    """Run `python -m command` in a copy of this process.

    Args:
        command: Module and arguments.
        folder: Where it runs.
        plugins: A folder that it finds modules in, if any.
        timeout_s: When it is ended; 0 for never.

    Returns:
        Its exit code, that of `SIGALRM` if it took too long, and what it printed.
    """
    import torch._dynamo  # noqa: F401 # what capture imports, too

    import sbp_torch.graph_capture  # noqa: F401

    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        with warnings.catch_warnings():
            # Threads of the test runner are not copied, nor needed.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # test runners use it, too
            signal.alarm(timeout_s)
            _run_and_exit(command, folder, plugins, printed.fileno())
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        return os.waitstatus_to_exitcode(status), printed.read()


def run_command(command: Sequence[str], folder: Path, *, limit_s: int = 800) -> tuple[int, str]:
    """Run `python -m command` in a copy of this process, or in one of its own if it has to be.

    Args:
        command: Module and arguments.
        folder: Where it runs.
        limit_s: Seconds after which it is ended.

    Returns:
        Its exit code, and what it printed.
    """
    if can_fork():
        return run_forked(command, folder, timeout_s=limit_s)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return done.returncode, done.stdout


def _run_and_exit(command: Sequence[str], folder: Path, plugins: str, output: int) -> NoReturn:
    """Run a command in this process, which then ends."""
    code: object = 70  # of a fault in these very lines
    try:
        os.chdir(folder)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(output, number)
            setattr(sys, stream, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        if plugins:
            sys.path.insert(0, plugins)
            # The rules that this process may have gathered are those without these plugins.
            installed_rules.cache_clear()
        sys.argv = list(command)
        warnings.resetwarnings()  # pytest's are errors
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=False)
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if isinstance(code, int) else 1)
