"""The operators that the core itself writes into graphs and plans, or knows by name.

A plan is a program of ATen calls (decision 7), whatever library executes it. These are the few that
no capture and no rule brings in: copies, what lays shards out for a message and takes them out
again, and our own. All else that is known of operators comes with the rules, see
`signatures.OperatorTraits`.
"""

from __future__ import annotations

ALIAS = "aten.alias.default"
CAT = "aten.cat.default"
CLONE = "aten.clone.default"
FULL = "aten.full.default"
MULTIPLY = "aten.mul.Tensor"

#: Copies the new value of a state over the old one: arguments are (state, value).
OVERWRITE = "aten.copy_.default"

PERMUTE = "aten.permute.default"
RESHAPE = "aten.reshape.default"
SPLIT_WITH_SIZES = "aten.split_with_sizes.default"
VIEW = "aten.view.default"

# Our own, in graphs.

#: Combines the parts of all micro-batches: arguments are (part, how).
ACCUMULATE = "sbp.accumulate"

#: Its first argument, but not before the second is made.
AFTER = "sbp.after"

#: A slice of a tensor, cut from it as it is stored if it can be.
PIECE = "sbp.piece"

# Our own, in plans.

#: A state of the host's memory, copied to the device: arguments are (state), and `device` by name.
TO_DEVICE = "sbp.to_device.default"

#: The new value of a state that is in the host's memory, copied there: arguments are
#: (state, value).
TO_HOST = "sbp.to_host.default"

#: The same, over the old value.
TO_HOST_IN_PLACE = "sbp.to_host_.default"

#: Runs a local boxing step: arguments are (value, index into `plan.steps`).
LOCAL_BOX = "sbp.local_box"
