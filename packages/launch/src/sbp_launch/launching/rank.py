"""One rank of a run, in a process of its own.

`python -m sbp_launch.launching.rank RUN_FOLDER WIDTH` reads the settings that the run folder holds,
and trains; Hydra is not asked again. Which rank it is its launcher has said (`world`).
"""

from __future__ import annotations

import os
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from sbp_core.errors import ConfigError, SbpError
from sbp_core.output import standard_output
from sbp_core.plugins import blame, discover
from sbp_launch.exit_codes import BAD_CONFIG, FAILED, INTERRUPTED
from sbp_launch.launching.logs import RankLog
from sbp_launch.run.file import load_run
from sbp_launch.run.status import outlive_status_signals
from sbp_launch.settings.check import check, in_use
from sbp_launch.settings.open_mesh import close_mesh
from sbp_launch.world import MPIEXEC, World


def run_rank(folder: Path, world: World, width: int | None = None) -> int:
    """Train as one rank of the run in a folder; return the exit code.

    Args:
        folder: Of the run, with its settings.
        world: Which rank.
        width: Characters in a line that is printed, where that is not to a terminal.
    """
    world.export()
    with RankLog(folder, world.rank) as log:
        try:
            _train(folder, world, width, log)
        except SbpError as error:
            log.note(_original_traceback(error))
            log.last_words(f"{_speaker(world)}: {error}")
            return BAD_CONFIG if isinstance(error, ConfigError) else FAILED
        except KeyboardInterrupt:
            return INTERRUPTED
        except SystemExit as error:
            if isinstance(error.code, int) and error.code:
                return error.code
            if not error.code:  # the run is not over, whatever the status says
                log.last_words(
                    f"{_speaker(world)}: the program called sys.exit({error.code or 0}) before the "
                    "run was over\n  to mend it: see who calls it: a model, a data set, a callback"
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
    # Here and not above: a wrong setting is answered without waiting for torch.
    from sbp_launch.console import FILE_WIDTH, make_console
    from sbp_launch.trainer.saved_settings import hash_of
    from sbp_launch.trainer.trainer import train

    log.note(f"settings: {hash_of(asdict(config))}\n")  # equal in the logs of all ranks
    if world.launcher == MPIEXEC:  # which gives its ranks a terminal of its own
        width = width or FILE_WIDTH
    try:
        train(config, registry, folder, world, make_console(width))
    except SbpError:
        raise
    except Exception as error:
        guilty = blame(error, in_use(composed, registry))
        if guilty is None:
            raise
        traceback.print_exc()
        raise guilty from error


def _original_traceback(error: SbpError) -> str:
    """Return the traceback of what an error comes from, if that is none of ours; else ""."""
    cause: BaseException | None = error
    while isinstance(cause, SbpError):
        cause = cause.__cause__
    return "" if cause is None else "".join(traceback.format_exception(cause))


def _speaker(world: World) -> str:
    """Return who speaks: rank 0 as the command itself."""
    if world.rank == 0:
        return "sbp-train"
    return f"sbp-train: rank {world.rank} (host {socket.gethostname()}, pid {os.getpid()})"


@standard_output("sbp-train", outlives=True)
def main() -> None:
    """Run one rank, and exit with its code."""
    outlive_status_signals()
    folder, width = sys.argv[1:]
    sys.exit(run_rank(Path(folder), World.of_environment(), int(width)))


if __name__ == "__main__":
    main()
