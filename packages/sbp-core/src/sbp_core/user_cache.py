"""Folders of a user: what `~` stands for, and where what can be made again is kept.

Stability: internal.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from sbp_core.errors import ConfigError

__all__ = ["cache_folder", "user_path"]


def user_path(given: str | Path, *, key: str) -> Path:
    """Return the path that a user names, with `~` and `~NAME` replaced by a home folder.

    Args:
        given: As it is written.
        key: The setting or argument that names it, for messages.

    Raises:
        ConfigError: nobody knows that home folder, or the text cannot be a path.
    """
    if "\0" in str(given):
        raise ConfigError(f"{key}={str(given)!r} is no path", accepted="a path without NUL")
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        user = Path(given).parts[0]
        raise ConfigError(
            f"{key}={given}: there is no home folder for {user}",
            accepted="a path from / or from the working folder, or ~ of a user whom this machine "
            "knows",
            todo="write the whole path" + ", or set HOME" * (user == "~"),
        ) from error


def cache_folder(kind: str) -> Path:
    """Return the folder of this user for one kind of thing, as the XDG standard says.

    Args:
        kind: Name of the folder below `sbp`, such as `signatures`.

    Raises:
        ConfigError: there is neither a home folder nor one of this user's own for temporary files.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "sbp" / kind
    try:
        return Path.home() / ".cache" / "sbp" / kind
    except RuntimeError:  # a user of a container, whom its system does not know
        return _temporary() / kind


def _temporary() -> Path:
    """Return a folder for temporary files that only this user can write.

    Raises:
        ConfigError: somebody else has taken its name.
    """
    folder = Path(tempfile.gettempdir(), f"sbp-cache-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigError(
            f"this user has no home folder, and {folder} is not theirs alone",
            todo="set XDG_CACHE_HOME to a folder of yours",
        )
    return folder
