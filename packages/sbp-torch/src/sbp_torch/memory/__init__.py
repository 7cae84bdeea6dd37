"""Memory of tensors: layouts of operator results (`layout`), and measured bytes (`meter`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_torch.memory.layout import Layouts
    from sbp_torch.memory.meter import MemoryMeter

__all__ = ["Layouts", "MemoryMeter"]

__getattr__, __dir__ = lazy_room(__name__, layout="Layouts", meter="MemoryMeter")
