"""How packages export names: loaded when they are first used; and modules that can be called.

`from sbp_core import check; check(plan)` and `from sbp_core.check import CheckReport` should both
work, and importing the submodule rebinds the package's attribute to the module. So the module
itself passes calls on.

Stability: internal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from inspect import Signature, getdoc, signature
from types import ModuleType
from typing import Any

from sbp_core.collection import collection_paused

__all__ = ["lazy", "lazy_room", "make_callable"]


def lazy(
    room: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that loads what it offers when asked for it.

    Args:
        room: Name of the package.
        homes: Name -> module of the package that defines it, or the whole path of another module;
            `name -> name` for a submodule that is offered itself.
    """
    top = room.partition(".")[0]

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        home = homes[name]
        path = home if home.startswith(f"{top}.") else f"{room}.{home}"
        with nullcontext() if path in sys.modules else collection_paused():
            module = import_module(path)
        return module if homes[name] == name else getattr(module, name)

    return find, lambda: sorted(homes)


def lazy_room(room: str, **homes: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return what `lazy` does, of names that are listed by the module that defines them.

    Args:
        room: Name of the package.
        homes: Module -> the names that it defines, with spaces in between.
    """
    return lazy(room, {name: home for home, names in homes.items() for name in names.split()})


class _CallableModule(ModuleType):
    """A module whose call is that of its function of the same name."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self, self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        """What `inspect.signature` and help say of a call: the function's own signature."""
        return signature(getattr(self, self.__name__.rpartition(".")[2]))


def make_callable(name: str) -> None:
    """Let the loaded module `name` be called like `name.<last part>`, which help of it explains."""
    module, last = sys.modules[name], name.rpartition(".")[2]
    module.__class__ = _CallableModule
    function = getattr(module, last)
    told = f"{last}{signature(function)}\n\n{getdoc(function) or ''}".rstrip()
    module.__doc__ = f"{told}\n\nAbout the module:\n\n{module.__doc__ or ''}"
