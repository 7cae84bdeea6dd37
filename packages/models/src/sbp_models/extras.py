"""Libraries that only some data sets need: imported when these are built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sbp_core.errors import ConfigError


def library(name: str, *, extra: str, needed_by: str) -> Any:
    """Return a library that is in an extra of this package.

    Args:
        name: Name of its module.
        extra: The extra that installs it.
        needed_by: Option that needs it, such as `data=tokens`.

    Raises:
        ConfigError: it is not installed, or cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {name.partition('.')[0]}, which cannot be imported: {error}",
            todo=f'pip install "sbp-models[{extra}]"',
        ) from error
