"""sbp-aten: the meaning of ATen's operators, as rules of signatures and passes over graphs.

Everything is loaded when first used.
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
