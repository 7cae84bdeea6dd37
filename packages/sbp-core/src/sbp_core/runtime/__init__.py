"""The contract of runtimes: start a plan on states, run steps, return the states.

`contract` has the abstract classes that runtime plugins implement; `batches` computes which samples
of a batch a rank holds; `ownership` which rank saves which part of a state, and how a state is
gathered; `trace` records when the ranks of a traced step did what, and derives operator times.
"""

from __future__ import annotations

from sbp_core.runtime.batches import (
    BatchPart,
    batch_parts,
    batch_slots,
    local_samples,
    micro_batch_rows,
)
from sbp_core.runtime.contract import (
    BatchIs,
    NotFiniteStepError,
    Runtime,
    Session,
    Snapshot,
    StepResult,
    Watch,
    check_not_forked,
    unwatched,
)
from sbp_core.runtime.ownership import (
    Number,
    StatePiece,
    StateSlice,
    check_destination,
    counted_apart,
    gather_routes,
    known_state,
    lost_states,
    state_owners,
    state_slots,
    widened,
    with_states_of,
)
from sbp_core.runtime.trace import (
    MemorySample,
    Span,
    SpanKind,
    TensorMeter,
    Trace,
)
from sbp_core.runtime.traced_operators import measured_operators

__all__ = [
    "BatchIs",
    "BatchPart",
    "MemorySample",
    "NotFiniteStepError",
    "Number",
    "Runtime",
    "Session",
    "Snapshot",
    "Span",
    "SpanKind",
    "StatePiece",
    "StateSlice",
    "StepResult",
    "TensorMeter",
    "Trace",
    "Watch",
    "batch_parts",
    "batch_slots",
    "check_destination",
    "check_not_forked",
    "counted_apart",
    "gather_routes",
    "known_state",
    "local_samples",
    "lost_states",
    "measured_operators",
    "micro_batch_rows",
    "state_owners",
    "state_slots",
    "unwatched",
    "widened",
    "with_states_of",
]
