"""Rooms whose names are loaded when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    room: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads what it offers when asked for it.

    Args:
        room: Name of the package.
        homes: Name -> module of the package that defines it; `name -> name` for a submodule that
            is offered itself.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        module = import_module(f"{room}.{homes[name]}")
        return module if homes[name] == name else getattr(module, name)

    return find, lambda: sorted(homes)
