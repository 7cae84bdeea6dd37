"""The library that executes operators, such as PyTorch; the core knows none itself.

A plan can be made without one. What needs one is few: the types of a call that somebody asks
signatures for by hand, the signatures of an operator that nobody has described
(`signatures.library`), and how results are laid out in memory (`memory.lifetime`). A package that
brings one, such as `sbp-torch`, registers it as a plugin of kind `tensor_library`.
"""

from __future__ import annotations

from functools import cache

from sbp_core.errors import SbpLookupError
from sbp_core.plugins.discovery import discover


@cache
def tensor_library() -> object:
    """Return the tensor library that is installed.

    Raises:
        SbpLookupError: there is none, or there are several.
    """
    registry = discover()
    names = registry.names("tensor_library")
    if len(names) != 1:
        found = f"{len(names)} are: {', '.join(names)}" if names else "none is"
        raise SbpLookupError(
            f"one tensor library should be installed; {found}",
            accepted="exactly one plugin of kind 'tensor_library'",
            todo="uninstall all but one" if names else "pip install sbp-torch",
        )
    return registry.make("tensor_library", names[0])
