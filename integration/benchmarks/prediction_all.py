"""Calibrate this machine, then compare predicted and measured steps of processes.

    python integration/benchmarks/prediction_all.py [FOLDER] [--ranks 2 4] [--quick]

It runs these commands in turn: `sbp-calibrate` over gloo and over MPI; `peers --only ", auto"` with
the calibration for two ranks and with measured calls of each step, twice: with all ways in turns,
and with `--apart`; and `prediction_error.py` over both, with operators measured in other layouts.
FOLDER, by default a new one, gets the cluster files and the results. On two idle cores this takes
about twenty minutes with two ranks, and twenty-five with two and four ranks; `--quick`, to check
that it works, takes five. `prediction_error.py` needs `transformers`.
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


def commands(folder: Path, ranks: Sequence[int], *, quick: bool) -> Iterator[Sequence[str]]:
    """Yield the commands to run."""
    clusters = [folder / f"cluster{number}.json" for number in ranks]
    seconds, rounds = ("20", "3") if quick else ("40", "11")
    for boxing in BACKENDS:
        for number, cluster in zip(ranks, clusters, strict=True):
            calibrate = ("sbp-calibrate", f"boxing={boxing}", f"ranks={number}", f"out={cluster}")
            yield (*calibrate, f"time_s={seconds}", "max_bytes=67108864")
    python = sys.executable
    if 2 in ranks:
        peers = (python, str(HERE / "peers"), "--rounds", rounds, "--operators")
        pair = clusters[ranks.index(2)]
        known = [part for boxing in BACKENDS for part in ("--cluster", f"{boxing}={pair}")]
        chosen = ("--only", "face, auto" if quick else ", auto")
        yield (*peers, *chosen, *known, "--json", str(folder / "peers.json"))
        yield (*peers, *chosen, *known, "--apart", "--json", str(folder / "apart.json"))
    for boxing in BACKENDS:
        error = (python, str(HERE / "prediction_error.py"), rounds, "--boxing", boxing)
        known = ["--operators", "others", "--cluster", *map(str, clusters)]
        only = ("--ranks", str(ranks[0])) if len(ranks) == 1 else ()
        yield (*error, *only, *known, "--json", str(folder / f"cells_{boxing}.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="for the results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="2, 4, or both")
    parser.add_argument("--quick", action="store_true", help="few rounds, one model of peers")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="sbp-predictions-"))
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    for command in commands(folder, given.ranks, quick=given.quick):
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        print(f"\n{time.monotonic() - began_s:.0f} s, load {load}: {' '.join(command)}", flush=True)
        subprocess.run(command, check=True)
    print(f"\n{time.monotonic() - began_s:.0f} s in all; results in {folder}")


if __name__ == "__main__":
    main()
