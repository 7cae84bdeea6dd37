"""Commands that run in the background of a nox session."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import nox


@contextmanager
def beside(session: nox.Session, folder: Path, *command: str) -> Iterator[None]:
    """Run a command of the environment while the block runs; the session fails if the command does.

    The command has low priority, so it hardly slows down the block: tests of backends spend much of
    their time waiting for each other and for deadlines.
    """
    found = shutil.which(command[0], path=os.pathsep.join(session.virtualenv.bin_paths or ()))
    if found is None:
        session.error(f"{command[0]} is not installed")
    patient = ("nice", "-n", "10") if shutil.which("nice") else ()
    session.log(f"beside what follows: {' '.join(command)}")
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*patient, found, *command[1:]],
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # together with its children
            raise
        finally:
            code = process.wait()
            output.seek(0)
            session.log(f"{' '.join(command)}\n{output.read().rstrip()}")
    if code:
        session.error(f"{' '.join(command)} ended with exit code {code}")
