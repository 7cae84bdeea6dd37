"""sbp-torch: PyTorch for sbp. Capture, optimizers, execution, verification, boxing in one process.

Everything is loaded when first used; importing this package imports no torch.

Stability: stable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_torch.capture import capture as capture
    from sbp_torch.capture import initial_states as initial_states

__version__ = "0.1.0"

__all__ = ["capture", "initial_states"]

# `capture` is a module that is also called: `capture(model, ...)`.
__getattr__, __dir__ = lazy(__name__, {"capture": "capture", "initial_states": "capture"})
