"""Passes that need no knowledge of operators: pure functions graph -> graph.

`accumulation` makes micro-batches explicit; `recomputation` recomputes forward values in the
backward phase (choosing what to keep: `saved_activations`, `budget`, `closure`; rewriting:
`rematerialize`); `unknown_operators` decides about operators without a rule; `output_aliases` gives
outputs of the step separate memory. Passes that know ATen's operators, and the order of all passes,
are in `sbp_aten.passes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_core.passes.accumulation import accumulate
    from sbp_core.passes.options import RecomputeOptions
    from sbp_core.passes.output_aliases import unalias_outputs
    from sbp_core.passes.recomputation import (
        RecomputeReport,
        least_recompute_budget,
        recompute,
        recompute_report,
    )
    from sbp_core.passes.rematerialize import REMATERIALIZED
    from sbp_core.passes.saved_activations import saved_bytes
    from sbp_core.passes.unknown_operators import allow_unknown
    from sbp_core.passes.writer import GraphWriter

__all__ = [
    "REMATERIALIZED",
    "GraphWriter",
    "RecomputeOptions",
    "RecomputeReport",
    "accumulate",
    "allow_unknown",
    "least_recompute_budget",
    "recompute",
    "recompute_report",
    "saved_bytes",
    "unalias_outputs",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    accumulation="accumulate",
    options="RecomputeOptions",
    output_aliases="unalias_outputs",
    recomputation="RecomputeReport least_recompute_budget recompute recompute_report",
    rematerialize="REMATERIALIZED",
    saved_activations="saved_bytes",
    unknown_operators="allow_unknown",
    writer="GraphWriter",
)
