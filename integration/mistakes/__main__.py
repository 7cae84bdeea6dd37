"""The command: `python -m mistakes [WORD ...]`, run in the folder `integration`.

Makes every mistake whose name holds one of the words, prints its answer and the seconds it took,
and what is wrong with the answer; exit code 1 if anything is.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

# `python integration/mistakes` is to find the package too.
sys.path.insert(0, str(Path(__file__).parent.parent))

from mistakes.files import prepare
from mistakes.table import MISTAKES
from mistakes.trial import make


def main(words: list[str]) -> int:
    """Make the mistakes and return the exit code."""
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
            answer = make(mistake, folder)
            slowest = max(slowest, (answer.seconds, name))
            faults += bool(answer.faults)
            print(f"--- {name}: {' '.join(mistake.command)}  [{answer.seconds:.1f} s]")
            print(answer.text.strip())
            for fault in answer.faults:
                print(f"!!! {fault}")
    print(f"{len(chosen)} mistakes, {faults} badly answered; slowest: "
          f"{slowest[1]}, {slowest[0]:.1f} s")  # fmt: skip
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
