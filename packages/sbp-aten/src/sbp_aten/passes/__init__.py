"""Graph passes (pure functions graph -> graph), and the list of passes of every training step."""

from __future__ import annotations

from sbp_aten.passes.backward_split import split_backward
from sbp_aten.passes.batch_dim import expose_batch_dim
from sbp_aten.passes.batch_factors import samples_met
from sbp_aten.passes.casts import place_casts
from sbp_aten.passes.constants import fold_constants
from sbp_aten.passes.deferred_batch_norm import defer_batch_norm
from sbp_aten.passes.deferred_reductions import accumulate_addends, defer_reductions
from sbp_aten.passes.device import place_on_device
from sbp_aten.passes.losses import split_classes, sum_losses
from sbp_aten.passes.operator_slicing import slice_operators
from sbp_aten.passes.pipeline import GraphPass, prepare_step
from sbp_aten.passes.precision import mixed_precision
from sbp_aten.passes.simplify import drop_identities, fold_views, share_expressions
from sbp_aten.passes.step_counters import tie_step_counters
from sbp_aten.passes.update_rows import whole_tables
from sbp_aten.passes.whole_batch import whole_batch_loss

__all__ = [
    "GraphPass",
    "accumulate_addends",
    "defer_batch_norm",
    "defer_reductions",
    "drop_identities",
    "expose_batch_dim",
    "fold_constants",
    "fold_views",
    "mixed_precision",
    "place_casts",
    "place_on_device",
    "prepare_step",
    "samples_met",
    "share_expressions",
    "slice_operators",
    "split_backward",
    "split_classes",
    "sum_losses",
    "tie_step_counters",
    "whole_batch_loss",
    "whole_tables",
]
