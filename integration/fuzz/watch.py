"""Try edits in processes with limits of memory and time; a killed process is a fault, too.

    parent  --kind, first, last-->  worker: limits itself, tries the edits one by one
    parent  <--"seed 17"-- --{...}-- a line before each edit, and one with its outcome

If a worker ends or prints nothing for too long, the edit that it named last has a fault; the next
worker continues after this edit.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

from fuzz.kinds import KINDS
from sbp_core.testing.fuzz import EditOutcome, try_edit

#: Bytes that a worker may allocate in addition to its memory at the beginning.
MOST_BYTES = 4 << 30

#: Seconds without output of a worker after which its parser counts as hanging.
MOST_SILENCE_S = 120.0

#: Number of edits of a worker, which are enough to detect leaks.
_EDITS_OF_WORKER = 20_000

_FOLDER = Path(__file__).parent.parent


def work(name: str, first: int, last: int) -> None:
    """Try the edits of some seeds, and print the outcome of each as a line of JSON."""
    kind, out = KINDS[name], sys.stdout
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_BYTES, taken + MOST_BYTES))
    # A crash should write no core dump.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, last):
            print(f"seed {seed}", file=out, flush=True)
            print(json.dumps(asdict(try_edit(kind, seed, Path(folder)))), file=out, flush=True)


def worker(name: str, first: int, last: int) -> list[str]:
    """Return the command of a worker."""
    return [sys.executable, "-m", "fuzz", "--work", name, str(first), str(last)]


def outcomes(
    name: str,
    first: int,
    last: int,
    *,
    command_of: Callable[[str, int, int], list[str]] = worker,
    most_silence_s: float = MOST_SILENCE_S,
) -> Iterator[EditOutcome]:
    """Try edits in watched processes; yield the outcome of each.

    Args:
        name: Name of a kind.
        first, last: Seeds from `first` to `last`, exclusive.
        command_of: Returns the command of a worker.
        most_silence_s: Seconds without output after which a worker is killed.
    """
    at = first
    while at < last:
        stop = min(last, at + _EDITS_OF_WORKER)
        command = command_of(name, at, stop)
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, cwd=_FOLDER
            ) as process,
        ):
            assert process.stdout is not None, "it is a pipe"
            for outcome in _told(process.stdout, most_silence_s):
                at = outcome.seed + 1
                yield outcome
            process.kill()
            code = process.wait()
            if at < stop:
                errors.seek(0)
                last_words = errors.read()[-1000:].decode("utf-8", "replace")
                yield EditOutcome(
                    seed=at,
                    error="ended",
                    fault=f"the process ended with code {code}, or said nothing: {last_words}",
                    time_s=0.0,
                )
                at += 1


def _told(pipe: IO[bytes], most_silence_s: float) -> Iterator[EditOutcome]:
    """Yield the outcomes of a worker, until it ends or prints nothing for too long."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        heard = time.monotonic()
        while time.monotonic() - heard < most_silence_s:
            if not selector.select(most_silence_s / 10):
                continue
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return
            heard = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"{"):
                    yield EditOutcome(**json.loads(line))
