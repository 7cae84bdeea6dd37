"""sbp-aten: what ATen's operators mean, as rules of signatures and passes over graphs.

Everything is loaded when first used.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_aten.pass_options import PassOptions
    from sbp_aten.passes import prepare_step

__version__ = "0.1.0"

__all__ = ["PassOptions", "prepare_step"]

__getattr__, __dir__ = lazy(__name__, {"PassOptions": "pass_options", "prepare_step": "passes"})
