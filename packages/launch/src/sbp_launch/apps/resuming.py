"""`sbp-train resume=RUN`: go on with a run, in its folder and with its settings.

    resume=runs/first trainer.steps=900

composes the settings that the run has left in `runs/first/config.yaml`, with those that are given
instead of its own. Nothing else of the run folder counts: it may come from elsewhere, and what the
command line of the run said to Hydra (`--config-dir`, `hydra.*`) is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from sbp_core.errors import ConfigError
from sbp_core.user_paths import user_path
from sbp_launch.checkpoint.places import AUTO
from sbp_launch.run.folder import RUN_FILE, load_run
from sbp_launch.settings.budget import Unit
from sbp_launch.settings.config import ComposedConfig, key_of
from sbp_launch.settings.resumed import RESUMED, offer, quoted

_KEY = "resume"

#: What chooses other settings than those of the run, beside overrides.
_FLAGS = ("-m", "--multirun", "-cn", "--config-name", "-cp", "--config-path")

#: What batch scripts are made of, so that commands may stand in it.
_COMMANDS = "launcher.parameters"


def expand_resume(arguments: Sequence[str]) -> list[str]:
    """Return a command line with `resume=RUN` replaced by what goes on with that run.

    Raises:
        ConfigError: RUN is no folder of a run, or a setting is given that says otherwise.
    """
    wanted = [text for text in arguments if text.startswith(f"{_KEY}=")]
    if not wanted:
        return list(arguments)
    given = [text for text in arguments if text not in wanted]
    for text in given:
        is_other = key_of(text) in ("trainer.resume", "hydra.run.dir")
        if is_other or text.partition("=")[0] in _FLAGS:
            raise ConfigError(
                f"{wanted[0]} goes on with one run in its own folder, and {text} says otherwise",
                where="the command line",
                todo=f"leave out {text}; or trainer.resume=PATH goes on in another folder",
            )
    if len(set(wanted)) > 1:
        raise ConfigError(
            f"{_KEY} is set twice: {wanted[0]} and {wanted[1]}", where="the command line"
        )
    named = wanted[0].partition("=")[2]
    folder = user_path(named if Path(named).exists() else named.strip("'\""), key=_KEY)
    earlier = _settings(folder, given)
    offer(earlier)
    return [
        *(_appended(text, earlier) for text in given),
        f"++trainer.resume={AUTO}",
        f"hydra.run.dir={quoted(str(folder))}",
        "--config-name",
        RESUMED,
    ]


def _settings(folder: Path, given: Sequence[str]) -> ComposedConfig:
    """Return the settings of a run, without those that are not repeated.

    Raises:
        ConfigError: they cannot be read, or commands would be taken from them.
    """
    try:
        earlier = load_run(folder)
    except ConfigError as error:
        raise ConfigError(
            f"there is no run to go on with in {folder}: {error.what}",
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
        # A run has one budget.
        values["trainer"] = {**trainer, **{unit: None for unit in units if unit in trainer}}
    if isinstance(launcher, Mapping) and (commands := launcher.get("parameters")):
        if keys.isdisjoint({"launcher", _COMMANDS}):
            raise ConfigError(
                f"{_COMMANDS} may hold commands, so it is not taken from a folder: {commands}",
                where=earlier.files["launcher"],
                todo=f"if it is yours, say it again: {_KEY}={folder} '{_COMMANDS}={{...}}'",
            )
        values["launcher"] = {**launcher, "parameters": {}}
    return replace(earlier, values=values)


def _appended(text: str, earlier: ComposedConfig) -> str:
    """Return an override that adds a setting as one that also replaces that of the run."""
    is_added = text.startswith("+") and not text.startswith("++")
    group = key_of(text).partition(".")[0]
    return f"+{text}" if is_added and "." in key_of(text) and group in earlier.values else text
