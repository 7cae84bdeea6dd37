"""Paths in the user's home folder: expansion of `~`, and the cache folder.

Only this module looks up the home folder. A user of a container often has none: no `HOME`, and no
entry among the users of the system.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from sbp_core.errors import ConfigError

__all__ = ["cache_folder", "user_path"]

logger = logging.getLogger(__name__)


def user_path(path: str | Path, *, key: str = "", where: str = "") -> Path:
    """Return a path given by the user, with `~` and `~USER` replaced by a home folder.

    Args:
        path: The path as it is written.
        key: The setting that contains it, if there is one.
        where: The call that contains it, or the command line.

    Raises:
        ConfigError: there is no such home folder, or the text is not a path.
    """
    named = f"{key}=" if key else ""
    if "\0" in str(path):
        what = f"{named}{str(path)!r} is no path"
        raise ConfigError(what, where=where or (), accepted="a path without NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{named}{path}: the home folder of ~ is not known",
            where=where or (),
            accepted="~ of a user that this machine knows, or whose HOME is set",
            todo="write the whole path",
        ) from error


def cache_folder(kind: str) -> Path:
    """Return this user's folder for a cache, by the XDG standard.

    For a user without a home it is a folder that lasts as long as this process.

    Args:
        kind: Name of the folder below `sbp`, such as `signatures`.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        root = _passing_folder()
    return root / "sbp" / kind


@cache
def _passing_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sbp-cache-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    logger.warning(
        "this user has no home folder: what is kept between runs is kept in %s until this process "
        "ends; to keep it longer, set HOME or XDG_CACHE_HOME",
        folder,
    )
    return folder
