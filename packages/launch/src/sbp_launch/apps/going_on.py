"""`sbp-train resume=RUN`: go on with a run, in its folder and with its settings.

    resume=runs/first trainer.steps=900

stands for the command line of that run, with the settings that are given instead of its own:

    cluster.mesh=[2] model.hidden=64 trainer.steps=900 trainer.resume=auto hydra.run.dir=runs/first

Hydra has left that command line in the run folder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from sbp_core.errors import ConfigError, SbpError
from sbp_core.serialize import read_text, read_yaml
from sbp_launch.checkpoint.places import AUTO
from sbp_launch.settings.budget import Unit
from sbp_launch.settings.config import GROUPS, key_of

_KEY = "resume"

#: What Hydra has written of a run: its overrides, without those of Hydra itself.
_OVERRIDES = ".hydra/overrides.yaml"

#: A run has one of them.
_BUDGETS = {f"trainer.{unit}" for unit in get_args(Unit)}


def going_on(arguments: Sequence[str]) -> list[str]:
    """Return a command line with `resume=RUN` replaced by what it stands for.

    Raises:
        ConfigError: RUN is no folder of a run, or a setting is given that says otherwise.
    """
    wanted = [text for text in arguments if text.startswith(f"{_KEY}=")]
    if not wanted:
        return list(arguments)
    given = [text for text in arguments if text not in wanted]
    for text in given:
        if text in ("-m", "--multirun") or key_of(text) in ("trainer.resume", "hydra.run.dir"):
            raise ConfigError(
                f"{wanted[0]} goes on with one run in its own folder, and {text} says otherwise",
                where="the command line",
                todo=f"leave out {text}; or trainer.resume=PATH goes on in another folder",
            )
    if len(set(wanted)) > 1:
        raise ConfigError(
            f"{_KEY} is set twice: {wanted[0]} and {wanted[1]}", where="the command line"
        )
    folder = Path(wanted[0].partition("=")[2].strip("'\""))
    kept = [text for text in _overrides(folder) if not _is_replaced(text, given)]
    return [*kept, *given, f"trainer.resume={AUTO}", f"hydra.run.dir={_quoted(str(folder))}"]


def _quoted(text: str) -> str:
    """Return a text as the value of an override, in quotes if Hydra needs them."""
    if re.fullmatch(r"[\w./-]+", text):
        return text
    return "'" + text.replace("'", "\\'") + "'"


def _overrides(folder: Path) -> list[str]:
    """Return the command line of a run.

    Raises:
        ConfigError: it cannot be read.
    """
    path = folder / _OVERRIDES
    try:
        found, lines = read_yaml(read_text(path), str(path))
    except SbpError as error:
        raise ConfigError(
            f"there is no run to go on with in {folder}: {error.what}",
            where=error.where,
            accepted="the folder of an earlier run of sbp-train, such as runs/DATE_TIME",
            todo=f"{_KEY}=FOLDER; or trainer.resume=PATH with the settings of a run",
        ) from error
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ConfigError(
            "these are not the settings of a run", where=lines.where([]), accepted="a list of texts"
        )
    return found


def _is_replaced(own: str, given: Sequence[str]) -> bool:
    """Whether a setting of the run gives way to those that are given."""
    key = _plain(key_of(own))
    if key in ("trainer.resume", "hydra.run.dir"):
        return True
    for other in map(_plain, map(key_of, given)):
        # Another option of a group knows nothing of the settings of the one before.
        is_of_option = other in GROUPS and key.startswith(f"{other}.")
        if key == other or is_of_option or {key, other} <= _BUDGETS:
            return True
    return False


def _plain(key: str) -> str:
    """Return a key without the folder of an option: `planner` of `planner/manual=zero`."""
    return key.partition("/")[0]
