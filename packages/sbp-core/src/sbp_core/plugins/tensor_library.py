"""Find the installed tensor library, which executes operators; the core itself knows none.

A plan can be compiled without one. It is only needed to find the types of a call for which a user
requests signatures (ways to shard it), the signatures of an operator without a rule
(`signatures.library`), and the memory layouts of results (`memory.prediction`). A package with a
tensor library, such as `sbp-torch`, registers it as a plugin of kind `tensor_library`.
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
