"""Run one rank of a training run in its own process, and write its log.

`python -m sbp_launch.launching.rank RUN_FOLDER WIDTH` reads the settings from the run folder, and
trains; Hydra is not used again. Launchers start it, with the rank in the environment (`world`).

Each rank has a log, `RUN/logs/rank_N.txt`. Rank 0 also writes to the terminal. All other ranks
write only to their logs, including the output of libraries and crashes; only their final error goes
to the terminal, too. A log begins with host and process. Messages of `logging`, including warnings,
have a timestamp.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import socket
import sys
import traceback
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TextIO

from sbp_core.errors import ConfigError, SbpError
from sbp_core.output import standard_output
from sbp_core.plugins import discover
from sbp_launch.exit_codes import BAD_CONFIG, FAILED, INTERRUPTED
from sbp_launch.run.folder import LOGS, load_run
from sbp_launch.run.status import ignore_status_signals
from sbp_launch.settings.check import blaming, check, close_mesh
from sbp_launch.world import MPIEXEC, World

#: Formats of `logging` messages: in a log, and on the terminal of rank 0.
_TIMED = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN = "%(levelname)s %(name)s: %(message)s"


def log_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's log."""
    return folder / LOGS / f"rank_{rank}.txt"


class RankLog:
    """Redirects the output of this process to its log, inside the `with` block.

    Args:
        folder: The run folder.
        rank: The rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path, self.rank = log_path(folder, rank), rank
        self._before = (sys.stdout, sys.stderr)
        self._saved: tuple[int, int] | None = None

    def __enter__(self) -> RankLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        if self.rank == 0:
            sys.stdout, sys.stderr = (_Both(stream, self._file) for stream in self._before)
        else:
            for stream in self._before:
                stream.flush()
            self._saved = (os.dup(1), os.dup(2))
            for number in (1, 2):
                os.dup2(self._file.fileno(), number)
        # If a library crashes, the log has the Python stack.
        faulthandler.enable(self._file)
        self._handlers = logging.root.handlers[:]
        logging.root.handlers[:] = [_handler(self._file, _TIMED)]
        if self.rank == 0:
            logging.root.addHandler(_handler(self._before[1], _PLAIN))
        logging.captureWarnings(True)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        self._file.write(
            f"{now} rank {self.rank}: host {socket.gethostname()}, process {os.getpid()}\n"
        )
        return self

    def __exit__(self, *raised: object) -> None:
        faulthandler.disable()
        logging.captureWarnings(False)
        logging.root.handlers[:] = self._handlers
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = self._before
        if self._saved is not None:
            for number, saved in zip((1, 2), self._saved, strict=True):
                os.dup2(saved, number)
                os.close(saved)
            self._saved = None
        self._file.close()

    def note(self, text: str) -> None:
        """Write a text to the log only."""
        sys.stdout.flush()
        self._file.write(text)

    def last_words(self, text: str) -> None:
        """Write a text to the log, and to the former stderr of this process."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        if self._saved is not None:
            os.write(self._saved[1], f"{text}\n".encode())


def _handler(stream: TextIO, form: str) -> logging.Handler:
    """Return a handler that writes messages to a stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(form))
    return handler


class _Both(io.TextIOBase):
    """Writes to a stream and to a log; in other respects like the stream."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        self._log.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._log.flush()
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override] # an attribute there
        return self._stream.encoding


def run_rank(folder: Path, world: World, width: int | None = None) -> int:
    """Train as one rank of the run in a folder; return the exit code.

    Args:
        folder: The run folder, with the settings.
        world: The rank of this process, and the number of processes.
        width: Line width in characters for output that is not to a terminal.
    """
    world.export()
    with RankLog(folder, world.rank) as log:
        try:
            _train(folder, world, width, log)
        except SbpError as error:
            # Log the traceback of the original exception, if that is not one of ours.
            cause: BaseException | None = error
            while isinstance(cause, SbpError):
                cause = cause.__cause__
            log.note("".join(traceback.format_exception(cause)) if cause is not None else "")
            log.last_words(f"{_speaker(world)}: {error}")
            return BAD_CONFIG if isinstance(error, ConfigError) else FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
        except SystemExit as error:
            if isinstance(error.code, int) and error.code:
                return error.code
            if not error.code:  # the run has not ended, although the exit code is 0
                log.last_words(
                    f"{_speaker(world)}: the program called sys.exit({error.code or 0}) before the "
                    "run was over\n  to fix it: find the call in model, data set or callbacks"
                )
                return FAILED
            log.last_words(f"{_speaker(world)}: {error}")
            return FAILED
        except Exception as error:
            traceback.print_exc()
            log.last_words(f"{_speaker(world)}: {type(error).__name__}: {error}\n  in {log.path}")
            return FAILED
    return 0


def _train(folder: Path, world: World, width: int | None, log: RankLog) -> None:
    registry, composed = discover(), close_mesh(load_run(folder), world)
    config = check(composed, registry)
    # Imported here: a wrong setting is reported without waiting for torch.
    from sbp_launch.console import FILE_WIDTH, make_console
    from sbp_launch.trainer.saved_settings import hash_of
    from sbp_launch.trainer.trainer import train

    log.note(f"settings: {hash_of(asdict(config))}\n")  # equal in the logs of all ranks
    if world.launcher == MPIEXEC:  # which gives each rank a pseudo-terminal
        width = width or FILE_WIDTH
    with blaming(composed, registry, first=traceback.print_exc):
        train(config, registry, folder, world, make_console(width))


def _speaker(world: World) -> str:
    """Return the prefix of a rank's messages; for rank 0 the name of the command."""
    if world.rank == 0:
        return "sbp-train"
    return f"sbp-train: rank {world.rank} (host {socket.gethostname()}, pid {os.getpid()})"


@standard_output("sbp-train", outlives=True)
def main() -> None:
    """Run one rank, and exit with its code."""
    ignore_status_signals()
    folder, width = sys.argv[1:]
    sys.exit(run_rank(Path(folder), World.of_environment(), int(width)))


if __name__ == "__main__":
    main()
