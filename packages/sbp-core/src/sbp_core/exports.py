"""Lazy exports of packages: names are loaded when first used, and old names work with a warning.

The `__init__` of each room (a package with declared exports) uses it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sbp_core.collection import collection_paused

__all__ = ["lazy_room", "moved_module", "moved_names"]


def lazy_room(room: str, **homes: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads its exports on first use.

    Args:
        room: Name of the package.
        homes: Module of the package, or the whole path of another module -> the names that it
            defines, with spaces in between; its own name stands for a submodule itself.
    """
    top = room.partition(".")[0]
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home = home_of[name]
        path = home if home.startswith(f"{top}.") else f"{room}.{home}"
        with nullcontext() if path in sys.modules else collection_paused():
            module = import_module(path)
        return module if home == name else getattr(module, name)

    return find, lambda: sorted(home_of)


def moved_names(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return `__getattr__` of a room that finds moved names at their new place, with a warning.

    Args:
        room: Name of the room that had them.
        homes: Old name -> the module and name that it has now: `"sbp_core.planning.Planner"`.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        said = f"{room}.{name} is {homes[name]} now"
        warnings.warn(said, DeprecationWarning, stacklevel=2)
        home, _, new = homes[name].rpartition(".")
        return getattr(import_module(home), new)

    return find


def moved_module(old: str, new: str) -> None:
    """Make `from old import name` still work, with a warning, for a module with the new name `new`.

    The package's attribute is unchanged: it may be a function with the same name as the old module.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        found = getattr(import_module(new), name)
        warnings.warn(f"{old}.{name} is {new}.{name} now", DeprecationWarning, stacklevel=2)
        return found

    module = sys.modules[old] = ModuleType(old)
    module.__spec__ = ModuleSpec(old, None)
    vars(module)["__getattr__"] = find
