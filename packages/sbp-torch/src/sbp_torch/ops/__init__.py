"""Operators of ours, registered with PyTorch, and what executes an operator of a name.

`operators` finds what a name means. Registered are random numbers that are drawn by counting
(`random`), fused updates of one parameter (`fused_updates`), and constants, products in a wider
dtype, and sums for batch normalisation (`arithmetic`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("sbp", "FRAGMENT")  # type: ignore[no-untyped-call] # torch leaves it untyped


def register(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag
) -> None:
    """Register an operator of ours with PyTorch, on all devices.

    Args:
        schema: `name(arguments) -> results`.
        function: Executes it.
        fake: Returns what it makes, without data.
        tags: What PyTorch may take for granted of it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)  # type: ignore[no-untyped-call] # torch leaves it untyped
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake(f"sbp::{name}", fake, lib=_LIBRARY)
