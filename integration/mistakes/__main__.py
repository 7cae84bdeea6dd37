"""The command: `python -m mistakes [WORD ...]`, run in the folder `integration`.

It makes every mistake whose name contains one of the words, prints its answer, the seconds it took,
and the faults of the answer; the exit code is 1 if there are faults. With `--within SECONDS`, an
answer that took longer on one core is a fault, too, unless it needs PyTorch.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

# This lets `python integration/mistakes` find the package, too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from mistakes.files import prepare
from mistakes.table import MISTAKES
from mistakes.trial import make


def cpu_s() -> float:
    """Return the CPU seconds of the ended child processes of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(argv: list[str]) -> int:
    """Make the mistakes and return the exit code."""
    parser = argparse.ArgumentParser(prog="mistakes")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    options = parser.parse_args(argv)
    words = options.words
    chosen = {
        name: mistake
        for name, mistake in MISTAKES.items()
        if not words or any(word in name for word in words)
    }
    faults, slowest = 0, (0.0, "")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        prepare(folder)
        for name, mistake in chosen.items():
            before = cpu_s()
            answer = make(mistake, folder)
            slowest = max(slowest, (answer.seconds, name))
            wrong = list(answer.faults)
            if not mistake.imports_torch and cpu_s() - before > options.within:
                wrong.append(f"took longer than {options.within:g} s")
            faults += bool(wrong)
            print(f"--- {name}: {' '.join(mistake.command)}  [{answer.seconds:.1f} s]")
            print(answer.text.strip())
            for fault in wrong:
                print(f"!!! {fault}")
    print(f"{len(chosen)} mistakes, {faults} badly answered; slowest: "
          f"{slowest[1]}, {slowest[0]:.1f} s")  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
