"""Entry point of one process of a calibration: `python -m sbp_launch.calibrate FOLDER`.

It prints no traceback: at Ctrl-C nothing, because the program that started it reports that; at an
expected error only its message.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from sbp_core.errors import SbpError


def main(folder: Path) -> None:
    """Run the job in a folder; after an `SbpError`, exit with code 1 and its message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported here: importing torch takes seconds, during which Ctrl-C may come.
    from sbp_launch.calibrate.measuring_rank import run_job

    try:
        run_job(folder)
    except SbpError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
