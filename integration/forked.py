"""Run our commands in forks of this process, so that PyTorch is imported only once.

This is for tests that run many commands. It needs one thread per process (`OMP_NUM_THREADS=1`),
because thread pools do not survive a fork.
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

#: Modules of the commands that import PyTorch.
COMMANDS = {
    "sbp-train": "sbp_launch.apps.train",
    "sbp-plan": "sbp_launch.apps.plan",
    "sbp-checkpoint": "sbp_launch.checkpoint.command.app",
    "sbp-watch": "sbp_launch.apps.watch",
}


def can_fork() -> bool:
    """Return whether commands can run in forks."""
    return hasattr(os, "fork") and os.environ.get("OMP_NUM_THREADS") == "1"


def run_forked(
    command: Sequence[str], folder: Path, plugins: str = "", timeout_s: int = 0
) -> tuple[int, str]:
    """Run `python -m command` in a fork of this process.

    Args:
        command: Module and arguments.
        folder: Its working directory.
        plugins: A folder with further modules, if any.
        timeout_s: Seconds after which it is ended; 0 for no limit.

    Returns:
        Its exit code, that of `SIGALRM` if it took too long, and its output.
    """
    import torch._dynamo  # noqa: F401 # capture imports it, too

    import sbp_torch.graph_capture  # noqa: F401

    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        with warnings.catch_warnings():
            # A fork does not copy the threads of the test runner, which are not needed.
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
    """Run `python -m command` in a fork of this process, or in a new process if necessary.

    Args:
        command: Module and arguments.
        folder: Its working directory.
        limit_s: Seconds after which it is ended.

    Returns:
        Its exit code, and its output.
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
    code: object = 70  # the exit code for an error in this function itself
    try:
        os.chdir(folder)
        for number, stream in ((1, "stdout"), (2, "stderr")):
            os.dup2(output, number)
            setattr(sys, stream, os.fdopen(number, "w", encoding="utf-8", closefd=False))
        if plugins:
            sys.path.insert(0, plugins)
            # This process may have cached the rules without these plugins.
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
