"""One process of a calibration: `python -m sbp_launch.calibrate FOLDER`.

It ends quietly: at Ctrl-C without a word, as the program that started it says so, and at an error
that was foreseen with its message alone.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from sbp_core.errors import SbpError


def main(folder: Path) -> None:
    """Do the job in a folder; exit with code 1 and the message if it cannot be done."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Here and not above: importing torch takes seconds, in which Ctrl-C may come.
    from sbp_launch.calibrate.measuring_rank import run_job

    try:
        run_job(folder)
    except SbpError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
