"""Check settings of the commands: lower bounds of integers, and files that can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sbp_core.errors import ConfigError


def check_least(
    config: object, low: int, *names: str, accepted: str = "", why: str = " is too small"
) -> None:
    """Check a lower bound of integer settings; settings of other types are skipped.

    Args:
        config: The object with the settings.
        low: The lower bound.
        names: Names of the settings.
        accepted: Accepted values in words; `an integer >= low` if left out.
        why: End of the message about a setting below the bound.

    Raises:
        ConfigError: a setting is below `low`.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, int) and value < low:
            what = f"{name}={value}{why}"
            raise ConfigError(what, accepted=accepted or f"an integer >= {low}")


def check_writable(key: str, path: str, example: str) -> None:
    """Check that a file can be written.

    Args:
        key: The setting that names the file.
        path: The file.
        example: An example of a path, for the message.

    Raises:
        ConfigError: it is a folder, its folder is missing, or it cannot be written.
    """
    file = Path(path).absolute()
    if not path or file.is_dir():
        raise ConfigError(f"{key}={path!r} is no file", accepted=f"a path such as {example}")
    try:
        # Open it, because permissions are no proof: even root cannot write to /proc.
        with file.open("ab") if file.exists() else tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}={path!r} cannot be written: "
            + (f"{error.strerror}" if file.parent.is_dir() else f"{file.parent} is no folder"),
            accepted="a file in a folder that exists and may be written to",
            todo="choose another path, or make the folder",
        ) from error


def check_distinct(outputs: Iterable[tuple[str, str]]) -> None:
    """Check that no two outputs are the same file, whose second content would replace the first.

    Args:
        outputs: The setting of each output, as in messages, and its file.

    Raises:
        ConfigError: two outputs are one file: by the same path, another spelling, or a link.
    """
    seen: dict[object, tuple[str, str]] = {}
    for setting, path in outputs:
        # Two names of a file that exists, such as hard links, have one inode.
        file = Path(os.path.realpath(path))
        found = file.stat() if file.exists() else None
        for key in (file, (found.st_dev, found.st_ino) if found else file):
            first, before = seen.setdefault(key, (setting, path))
            if (first, before) != (setting, path):
                raise ConfigError(
                    f"{first} and {setting} are written to one file: {before}"
                    + (f" is {path}" if path != before else ""),
                    accepted="another file for each output",
                    todo="change one of the names",
                )
