"""Our own operators, registered with PyTorch, and the lookup of operators by name.

`operators` finds the callable of a name. The registered operators draw random numbers by counting
(`random`), update one parameter with a fused kernel (`fused_updates`), and make constants, products
in a wider dtype, and sums for batch normalisation (`arithmetic`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sbp", "FRAGMENT")  # type: ignore[no-untyped-call] # torch leaves it untyped


def register(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag
) -> None:
    """Register one of our operators with PyTorch, on all devices.

    Args:
        schema: `name(arguments) -> results`.
        function: The implementation.
        fake: The fake implementation: returns tensors without data.
        tags: PyTorch's tags, which declare properties of the operator.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call] # torch leaves it untyped
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake(f"sbp::{name}", fake, lib=_LIBRARY)
