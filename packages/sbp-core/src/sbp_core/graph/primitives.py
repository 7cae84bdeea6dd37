"""The operators that the core itself writes into graphs and plans.

A plan is a program of ATen calls (decision 7), whatever library executes it. These are the few that
no capture and no rule brings in: copies, and what lays shards out for a message and takes them out
again. All else that is known of operators comes with the rules, see `signatures.OperatorTraits`.
"""

from __future__ import annotations

ALIAS = "aten.alias.default"
CAT = "aten.cat.default"
CLONE = "aten.clone.default"
COPY_INTO = "aten.copy_.default"
MULTIPLY = "aten.mul.Tensor"
PERMUTE = "aten.permute.default"
RESHAPE = "aten.reshape.default"
SPLIT_WITH_SIZES = "aten.split_with_sizes.default"
VIEW = "aten.view.default"
