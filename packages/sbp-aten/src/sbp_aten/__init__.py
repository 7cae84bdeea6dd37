"""Sharding rules of ATen's operators, and passes over the graph of a training step.

Submodules are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_aten.pass_options import LossMeaning, PassOptions
    from sbp_aten.passes import prepare_step

__version__ = "0.1.0"

__all__ = ["LossMeaning", "PassOptions", "prepare_step"]

__getattr__, __dir__ = lazy_room(
    __name__, pass_options="LossMeaning PassOptions", passes="prepare_step"
)
