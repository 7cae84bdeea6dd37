"""sbp-torch: PyTorch for sbp. Capture, optimizers, execution, verification, boxing in one process.

Everything is loaded when first used; importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room, moved_module

if TYPE_CHECKING:
    from sbp_torch.deferred_init import deferred
    from sbp_torch.graph_capture import (
        capture,
        counted_random,
        flatten_batch,
        initial_states,
        scalar_values,
    )
    from sbp_torch.interchange.torch_states import (
        from_model_state,
        from_optimizer_state,
        to_model_state,
        to_optimizer_state,
    )
    from sbp_torch.update_options import LossScaling, UpdateOptions

__version__ = "0.1.0"

__all__ = [
    "LossScaling",
    "UpdateOptions",
    "capture",
    "counted_random",
    "deferred",
    "flatten_batch",
    "from_model_state",
    "from_optimizer_state",
    "initial_states",
    "scalar_values",
    "to_model_state",
    "to_optimizer_state",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    deferred_init="deferred",
    graph_capture="capture counted_random flatten_batch initial_states scalar_values",
    update_options="LossScaling UpdateOptions",
    **{
        "interchange.torch_states": "from_model_state from_optimizer_state to_model_state "
        "to_optimizer_state"
    },
)

moved_module("sbp_torch.capture", "sbp_torch.graph_capture")
moved_module("sbp_torch.testing.snapshots", "sbp_torch.testing.snapshot_suite")
moved_module("sbp_torch.testing.states", "sbp_torch.testing.state_suite")
