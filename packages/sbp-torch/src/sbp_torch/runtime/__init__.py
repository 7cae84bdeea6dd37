"""The reference runtime, execution of a graph on one device, and code that all runtimes share.

`reference` runs all ranks in lock-step in one thread, `single` runs a graph on one device. Shared
code: `store` holds the shards of states, `sharing` lets two sessions use the same states, `devices`
moves tensors to the CPU or GPU, `feeding` cuts batches into shards, `accumulation` sums over
micro-batches, `snapshots` copies states for checkpoints, `finite` and `bad_values` detect infinite
and NaN results, and `partial_update` reports steps that failed while they overwrote states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_torch.runtime.accumulation import Accumulation
    from sbp_torch.runtime.bad_values import BadValue, BadValueWatch
    from sbp_torch.runtime.devices import RankDevice, check_device
    from sbp_torch.runtime.feeding import Feeder
    from sbp_torch.runtime.finite import not_finite, undo_limits, undone_error
    from sbp_torch.runtime.partial_update import (
        overwrite,
        partially_updated,
        step_failure,
        step_interrupted,
        tells_of_partial_update,
    )
    from sbp_torch.runtime.reference import ReferenceSession
    from sbp_torch.runtime.sharing import store_of
    from sbp_torch.runtime.single import run_graph
    from sbp_torch.runtime.state_layout import Values
    from sbp_torch.runtime.store import StateStore, check_tensor

__all__ = [
    "Accumulation",
    "BadValue",
    "BadValueWatch",
    "Feeder",
    "RankDevice",
    "ReferenceSession",
    "StateStore",
    "Values",
    "check_device",
    "check_tensor",
    "not_finite",
    "overwrite",
    "partially_updated",
    "run_graph",
    "step_failure",
    "step_interrupted",
    "store_of",
    "tells_of_partial_update",
    "undo_limits",
    "undone_error",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    accumulation="Accumulation",
    bad_values="BadValue BadValueWatch",
    devices="RankDevice check_device",
    feeding="Feeder",
    finite="not_finite undo_limits undone_error",
    partial_update="overwrite partially_updated step_failure step_interrupted "
    "tells_of_partial_update",
    reference="ReferenceSession",
    sharing="store_of",
    single="run_graph",
    state_layout="Values",
    store="StateStore check_tensor",
)
