"""Let a module be called like the function it is named for.

`from sbp_core import check; check(plan)` and `from sbp_core.check import CheckReport` should both
work, and importing the submodule rebinds the package's attribute to the module. So the module
itself passes calls on.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """A module whose call is that of its function of the same name."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        function = getattr(self, self.__name__.rpartition(".")[2])
        return function(*args, **kwargs)


def make_callable(name: str) -> None:
    """Let the loaded module `name` be called like `name.<last part>`."""
    sys.modules[name].__class__ = _CallableModule
