"""What is checked of settings: their least numbers, and files that a command writes at its end."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sbp_core.errors import ConfigError


def check_least(
    config: object, low: int, *names: str, accepted: str = "", why: str = " is too small"
) -> None:
    """Check settings that are whole numbers, those that are set.

    Args:
        config: Has them.
        low: The least that is accepted.
        names: Of the settings.
        accepted: What is accepted, in words; `an integer >= low` if left out.
        why: What is said of one that is less.

    Raises:
        ConfigError: one is below `low`.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, int) and value < low:
            what = f"{name}={value}{why}"
            raise ConfigError(what, accepted=accepted or f"an integer >= {low}")


def check_writable(key: str, path: str, example: str) -> None:
    """Check that a file can be written.

    Args:
        key: The setting that names it.
        path: The file.
        example: Such a setting.

    Raises:
        ConfigError: it is a folder, its folder is missing, or it cannot be written.
    """
    file = Path(path).absolute()
    if not path or file.is_dir():
        raise ConfigError(f"{key}={path!r} is no file", accepted=f"a path such as {example}")
    try:
        # By writing, as permissions do not tell: root may write anywhere, and yet not to /proc.
        with file.open("ab") if file.exists() else tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}={path!r} cannot be written: "
            + (f"{error.strerror}" if file.parent.is_dir() else f"{file.parent} is no folder"),
            accepted="a file in a folder that exists and may be written to",
            todo="choose another path, or make the folder",
        ) from error
