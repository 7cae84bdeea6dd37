"""Time how fast a run reports its status: `python benchmarks/status_time.py [RANKS]`.

A GPT trains in a pipeline, as threads, over gloo and over MPI. Each process gets SIGUSR1; the
time is until all have completely written their files. Then `sbp-watch RUN --once` asks by sockets;
its time includes its own start. This is repeated while the last process is stopped, like a hanging
one: then the other processes write, and `sbp-watch` waits 2 s for it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_PATIENCE_S = 120.0


def main(num_ranks: int) -> None:
    """Print a line for each launcher, with and without a rank that hangs."""
    print(f"{num_ranks} ranks             SIGUSR1 to all files    sbp-watch")
    for boxing, launcher in (("local", "threads"), ("torch", "torchrun"), ("mpi", "mpiexec")):
        with tempfile.TemporaryDirectory() as folder:
            _measure(Path(folder), boxing, launcher, num_ranks)


def _measure(folder: Path, boxing: str, launcher: str, num_ranks: int) -> None:
    command = [
        sys.executable, "-m", "sbp_launch.apps.train", "model=gpt", "planner=manual/pipeline",
        f"cluster.mesh=[{num_ranks}]", "cluster.axes=[pipe]", "trainer.batch_size=16",
        "trainer.micro_batches=8", "trainer.steps=1000000", "trainer.compare_steps=0",
        f"boxing={boxing}", f"launcher={launcher}", "hydra.run.dir=run",
    ]  # fmt: skip
    logs = folder / "run" / "logs"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL) as run:
        try:
            pids = _pids(logs, 1 if launcher == "threads" else num_ranks)
            print(f"{launcher:<18}{_asked(logs, pids):>18.3f} s{_watched(logs)[1]:>12.3f} s")
            if len(pids) > 1:
                *others, hanging = pids
                os.kill(hanging, signal.SIGSTOP)
                time.sleep(1.0)
                took_s = _asked(logs, others), _watched(logs)[1]
                os.kill(hanging, signal.SIGCONT)
                print(f"  one is stopped  {took_s[0]:>18.3f} s{took_s[1]:>12.3f} s")
        finally:
            run.send_signal(signal.SIGTERM)


def _pids(logs: Path, count: int) -> list[int]:
    """Return the process ids of a run in rank order, after all have done their first steps."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        told = _watched(logs)[0]
        pids = re.findall(r"pid (\d+) · .*[1-9] steps are done", told)
        if len(pids) == count:
            return [int(pid) for pid in pids]
        time.sleep(0.1)
    raise TimeoutError(f"the run in {logs.parent} takes no steps")


def _asked(logs: Path, pids: Sequence[int]) -> float:
    """Return the seconds until all have written their files."""
    files = [logs / f"status_{rank}.txt" for rank in range(len(pids))]
    before = [file.stat().st_size if file.exists() else 0 for file in files]
    begun_s = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    for file, size in zip(files, before, strict=True):
        while not (file.exists() and file.read_bytes()[size:].endswith(b"\n\n")):
            time.sleep(0.001)
    return time.monotonic() - begun_s


def _watched(logs: Path) -> tuple[str, float]:
    """Return the output of `sbp-watch`, and the seconds that it takes."""
    begun_s = time.monotonic()
    command = [sys.executable, "-m", "sbp_launch.apps.watch", str(logs.parent), "--once"]
    environment = {**os.environ, "COLUMNS": "200"}
    told = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return told.stdout, time.monotonic() - begun_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
