"""The command: `python -m documents [PAGE ...]`, run in the folder `integration`.

Runs pages, all by default, each in its own process and empty folder. Prints the number of blocks
that were run, skipped blocks with reasons, and faults; the exit code is 1 if there are faults.
`--times` prints the duration of each command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# This lets `python integration/documents` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from documents.page import run_page
from documents.pages import ROOT, pages


def run_here(name: str, *, with_times: bool) -> int:
    """Run a page in a new empty folder, and return the exit code."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # empty, as for a new user
        os.chdir(folder)
        began = time.perf_counter()
        report = run_page(ROOT / name, name)
        seconds = time.perf_counter() - began
        os.chdir(ROOT)
    if report.num_run or report.not_run or report.faults:
        used = sum(os.times()[:4])
        print(
            f"{name}: {report.num_run} run, {len(report.not_run)} not, {seconds:.1f} s, "
            f"{used:.1f} s of processors"
        )
    if with_times:
        for command, took in report.seconds.items():
            print(f"  {took:5.1f} s  {command}")
    for line in report.not_run:
        print(f"  not run: {line}")
    for fault in report.faults:
        print(f"!!! {fault}")
    return 1 if report.faults else 0


def main(arguments: list[str]) -> int:
    """Run pages and return the exit code."""
    options = [text for text in arguments if text.startswith("--")]
    chosen = [text for text in arguments if not text.startswith("--")]
    if len(chosen) == 1:
        return run_here(chosen[0], with_times="--times" in options)
    command = [sys.executable, "-m", "documents", *options]
    folder = ROOT / "integration"
    codes = [subprocess.run([*command, name], cwd=folder).returncode for name in chosen or pages()]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
