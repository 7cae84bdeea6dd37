"""The command `sbp-train`: check the config, then train. Imports no torch until it trains.

It may be one of several processes, which torchrun, mpiexec or srun started. Then rank 0 does what
is said here, and the others follow it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from sbp_core.errors import ConfigError, SbpError
from sbp_core.output import standard_output
from sbp_core.plugins import PluginRegistry
from sbp_launch.apps.app import run
from sbp_launch.apps.resuming import expand_resume
from sbp_launch.checkpoint.places import AUTO, find_checkpoints, look
from sbp_launch.exit_codes import BAD_CONFIG, FAILED, INTERRUPTED
from sbp_launch.launching.launching import choose_launcher, follow, launch
from sbp_launch.launching.meeting import Meeting, Told, meet
from sbp_launch.run.status import outlive_status_signals
from sbp_launch.settings.check import check, close_mesh
from sbp_launch.settings.config import Application, ComposedConfig, RunConfig
from sbp_launch.world import World

_NAME = "sbp-train"


def check_train(composed: ComposedConfig, registry: PluginRegistry, *, world: World) -> RunConfig:
    """Return the run that a composed config describes, with the launcher that it means.

    Raises:
        ConfigError: see `check` and `choose_launcher`; or there are no weights to start from, or no
            checkpoint to go on from.
    """
    composed = close_mesh(composed, world)
    config = check(composed, registry)
    trainer = config.trainer
    _check_place("trainer.init_from", trainer.init_from, look)
    if trainer.resume != AUTO:
        _check_place("trainer.resume", trainer.resume, find_checkpoints)
    return choose_launcher(config, composed, registry, world)


def _check_place(key: str, place: str | None, find: Callable[[str], object]) -> None:
    """Look whether there is what a setting names, if that is on this machine.

    Raises:
        ConfigError: there is not.
    """
    if place is None or "://" in place:
        return
    try:
        find(place)
    except ConfigError as error:
        raise error.replaced(ConfigError, what=f"{key}={place}: {error.what}") from error


def make_application(world: World, meeting: Meeting | None = None) -> Application[RunConfig]:
    """Return the command, in a process that stands somewhere among others."""

    def train(config: RunConfig, registry: PluginRegistry, run_folder: Path) -> None:
        of_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
        launch(config, registry, run_folder, world, meeting, of_sweep=of_sweep)

    return Application(
        name=_NAME,
        about="train a model on many ranks as if on one device",
        config_name="config",
        usage=("resume=RUN_FOLDER [KEY=VALUE ...]",),
        check=partial(check_train, world=world),
        task=train,
        may_overwrite=lambda config: config.trainer.overwrite or config.trainer.resume == AUTO,
        reads_folder_alone=world.size == 1,
        sweep_goes_on=True,
    )


def _run(world: World, meeting: Meeting | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = expand_resume(sys.argv[1:])
    if arguments != sys.argv[1:]:
        sys.stdout.write(f"{_NAME}: going on with the settings of the run\n")
        sys.argv[1:] = arguments
    return run(make_application(world, meeting))


def _run_among(world: World) -> int:
    """Run as one of several processes; return the exit code."""
    world.export()
    meeting = meet(world)
    if world.rank:
        code = follow(meeting, world)
    else:
        code = FAILED
        try:
            code = _run(world, meeting)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else FAILED
        finally:
            meeting.tell(Told(code=code))
    meeting.leave(code)
    return code


@standard_output(_NAME, outlives=True)
def main() -> None:
    """Run `sbp-train` and exit with its code."""
    outlive_status_signals()
    world = World()
    try:
        world = World.of_environment()
        code = _run(world) if world.size == 1 else _run_among(world)
    except SbpError as error:
        # Once, where all ranks say the same; of a failure each has its own to say.
        if not world.rank or not isinstance(error, ConfigError):
            sys.stderr.write(f"{_NAME}: {error}\n")
        code = BAD_CONFIG if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:  # while it met the others, or waited for the next run
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
