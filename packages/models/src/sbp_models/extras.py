"""Import optional libraries (extras of this package) when a data set that needs them is built."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sbp_core.errors import ConfigError


def library(name: str, *, extra: str, needed_by: str) -> Any:
    """Import and return a library that an extra of this package installs.

    Args:
        name: Name of the module.
        extra: The extra that installs it.
        needed_by: Option that needs it, such as `data=tokens`.

    Raises:
        ConfigError: the library is not installed, or cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{needed_by} needs {name.partition('.')[0]}, which cannot be imported: {error}",
            todo=f'pip install "sbp-models[{extra}]"',
        ) from error
