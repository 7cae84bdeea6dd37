"""Calibrate this machine, then compare predicted and measured steps of processes: all in one go.

    python integration/benchmarks/prediction_all.py [FOLDER] [--quick]

Runs, one after the other, what may also be run by itself: `sbp-calibrate` over gloo and over MPI
with two ranks, `prediction_error.py` with what it found, operators measured in other layouts, over
both, and `peers --only ", auto"`. FOLDER, by default a new one, gets the cluster file and the
results. It takes about ten minutes on two cores; with `--quick`, for a look at whether it works,
three. Means something only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent

BACKENDS = ("torch", "mpi")


def commands(folder: Path, *, quick: bool) -> Iterator[Sequence[str]]:
    """Yield what is run."""
    cluster = folder / "cluster.json"
    seconds, rounds = ("20", "3") if quick else ("40", "11")
    for boxing in BACKENDS:
        calibrate = ("sbp-calibrate", f"boxing={boxing}", "ranks=2", f"out={cluster}")
        yield (*calibrate, f"time_s={seconds}", "max_bytes=67108864")
    python, known = sys.executable, ("--operators", "others", "--cluster", str(cluster))
    for boxing in BACKENDS:
        error = (python, str(HERE / "prediction_error.py"), rounds, "--ranks", "2", *known)
        yield (*error, "--boxing", boxing, "--json", str(folder / f"cells_{boxing}.json"))
    peers = (python, str(HERE / "peers"), "--rounds", rounds, "--operators")
    clusters = [part for boxing in BACKENDS for part in ("--cluster", f"{boxing}={cluster}")]
    chosen = ("--only", "face, auto" if quick else ", auto")
    yield (*peers, *chosen, *clusters, "--json", str(folder / "peers.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="for the results")
    parser.add_argument("--quick", action="store_true", help="few rounds, one model of peers")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="sbp-predictions-"))
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    for command in commands(folder, quick=given.quick):
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"\n{time.monotonic() - began_s:.0f} s, load {load}: {' '.join(command)}", flush=True)
        subprocess.run(command, check=True)
    print(f"\n{time.monotonic() - began_s:.0f} s in all; results in {folder}")


if __name__ == "__main__":
    main()
