"""The command `sbp-train`: check the config, then train. It imports torch only for training.

If torchrun, mpiexec or srun started several processes, rank 0 runs this command, and the other
ranks follow its orders.

`sbp-train resume=RUN` continues a run, in its folder and with its settings:

    resume=runs/first trainer.steps=900

composes the settings in `runs/first/config.yaml` with the given overrides. No other setting is
read from the run folder, because it may come from elsewhere; Hydra's own settings of the earlier
run (`--config-dir`, `hydra.*`) are not repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from sbp_core.errors import ConfigError, SbpError
from sbp_core.output import standard_output
from sbp_core.plugins import PluginRegistry
from sbp_core.user_paths import user_path
from sbp_launch.apps.hydra_app import run
from sbp_launch.checkpoint.places import AUTO, find_checkpoints, look
from sbp_launch.exit_codes import BAD_CONFIG, FAILED, INTERRUPTED, ended_by
from sbp_launch.launching.launching import choose_launcher, follow, launch
from sbp_launch.launching.rendezvous import Rendezvous, RunOrder, connect
from sbp_launch.run.folder import RUN_FILE, load_run
from sbp_launch.run.status import ignore_status_signals
from sbp_launch.settings.budget import Unit
from sbp_launch.settings.check import check, close_mesh
from sbp_launch.settings.config import Application, ComposedConfig, RunConfig, key_of
from sbp_launch.settings.resumed import RESUMED, offer, quote
from sbp_launch.world import World

_KEY = "resume"

#: Flags that would choose other settings than those of the run.
_FLAGS = ("-m", "--multirun", "-cn", "--config-name", "-cp", "--config-path")

#: Parameters of batch scripts, which may contain shell commands.
_COMMANDS = "launcher.parameters"


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Replace `resume=RUN` in a command line by overrides that continue that run.

    Raises:
        ConfigError: RUN is not a run folder, or another override contradicts it.
    """
    wanted = [text for text in arguments if text.startswith(f"{_KEY}=")]
    if not wanted:
        return list(arguments)
    given = [text for text in arguments if text not in wanted]
    for text in given:
        is_other = key_of(text) in ("trainer.resume", "hydra.run.dir")
        if is_other or text.partition("=")[0] in _FLAGS:
            raise ConfigError(
                f"{wanted[0]} continues a run in its own folder, so {text} cannot be given, too",
                where="the command line",
                todo=f"leave out {text}; or continue in another folder: trainer.resume=PATH",
            )
    if len(set(wanted)) > 1:
        raise ConfigError(
            f"{_KEY} is set twice: {wanted[0]} and {wanted[1]}", where="the command line"
        )
    named = wanted[0].partition("=")[2]
    folder = user_path(named if Path(named).exists() else named.strip("'\""), key=_KEY)
    earlier = _settings(folder, given)
    offer(earlier)

    def is_added(text: str) -> bool:
        """Whether an override adds a setting inside a group of the run's settings."""
        key = key_of(text)
        adds = text.startswith("+") and not text.startswith("++")
        return adds and "." in key and key.partition(".")[0] in earlier.values

    return [
        *(f"+{text}" if is_added(text) else text for text in given),
        f"++trainer.resume={AUTO}",
        f"hydra.run.dir={quote(str(folder))}",
        "--config-name",
        RESUMED,
    ]


def _settings(folder: Path, given: Sequence[str]) -> ComposedConfig:
    """Return the settings of a run, without those that are not repeated.

    Raises:
        ConfigError: they cannot be read, or they contain shell commands.
    """
    try:
        earlier = load_run(folder)
    except ConfigError as error:
        raise ConfigError(
            f"there is no run to continue in {folder}: {error.what}",
            where=error.where,
            accepted=f"the folder of an earlier run of sbp-train with its {RUN_FILE}, such as "
            "runs/DATE_TIME",
            todo=f"{_KEY}=FOLDER; or trainer.resume=PATH with the settings of a run",
        ) from error
    keys = {key_of(text) for text in given}
    values = dict(earlier.values)
    trainer, launcher = values.get("trainer"), values.get("launcher")
    units = get_args(Unit)
    if isinstance(trainer, Mapping) and not keys.isdisjoint(f"trainer.{unit}" for unit in units):
        # A run has only one unit of its budget.
        values["trainer"] = {**trainer, **{unit: None for unit in units if unit in trainer}}
    if isinstance(launcher, Mapping) and (commands := launcher.get("parameters")):
        if keys.isdisjoint({"launcher", _COMMANDS}):
            raise ConfigError(
                f"{_COMMANDS} may hold commands, so it is not taken from a folder: {commands}",
                where=earlier.files["launcher"],
                todo=f"if you trust it, repeat it: {_KEY}={folder} '{_COMMANDS}={{...}}'",
            )
        values["launcher"] = {**launcher, "parameters": {}}
    return replace(earlier, values=values)


_NAME = "sbp-train"


def check_train(composed: ComposedConfig, registry: PluginRegistry, *, world: World) -> RunConfig:
    """Return the run that a composed config describes, with its launcher chosen.

    Raises:
        ConfigError: see `check` and `choose_launcher`; or there are no weights to start from, or no
            checkpoint to resume from.
    """
    composed = close_mesh(composed, world)
    config = check(composed, registry)
    trainer = config.trainer
    _check_place("trainer.init_from", trainer.init_from, look)
    if trainer.resume != AUTO:
        _check_place("trainer.resume", trainer.resume, find_checkpoints)
    return choose_launcher(config, composed, registry, world)


def _check_place(key: str, place: str | None, find: Callable[[str], object]) -> None:
    """Check that the path of a setting exists and can be used, unless it is an address.

    Raises:
        ConfigError: it cannot.
    """
    if place is None or "://" in place:
        return
    try:
        find(place)
    except ConfigError as error:
        raise error.replaced(ConfigError, what=f"{key}={place}: {error.what}") from error


def make_application(world: World, meeting: Rendezvous | None = None) -> Application[RunConfig]:
    """Return the command for a process with the given rank and number of processes."""

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


def _run(world: World, meeting: Rendezvous | None = None) -> int:
    """Run the command; return its exit code."""
    arguments = expand_resume(sys.argv[1:])
    if arguments != sys.argv[1:]:
        sys.stdout.write(f"{_NAME}: continuing with the settings of the run\n")
        sys.argv[1:] = arguments
    return run(make_application(world, meeting))


def _run_among(world: World) -> int:
    """Run as one of several processes; return the exit code."""
    world.export()
    meeting = connect(world)
    if world.rank:
        code = follow(meeting, world)
    else:
        code = FAILED
        try:
            code = _run(world, meeting)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else FAILED
        finally:
            meeting.broadcast(RunOrder(code=code))
    meeting.leave(code)
    return code


@standard_output(_NAME, outlives=True)
def main() -> None:
    """Run `sbp-train` and exit with its code."""
    ignore_status_signals()
    world = World()
    try:
        world = World.of_environment()
        code = _run(world) if world.size == 1 else _run_among(world)
    except SbpError as error:
        # An error of the config is equal on all ranks, so rank 0 prints it; failures may differ.
        is_said = not world.rank or not isinstance(error, ConfigError)
        code = ended_by(error, _NAME) if is_said else BAD_CONFIG
    except KeyboardInterrupt:  # while connecting, or while waiting for the next run
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
