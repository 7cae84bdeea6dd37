"""Names of the operators that the core itself writes into graphs and plans, or knows by name.

A plan is a program of ATen calls (decision 7), whatever library executes it. These few operators
come from no capture and no rule: copies, operators that pack shards into messages and unpack them,
and our own. The properties of all other operators come with the rules, see
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

#: The `how` of an accumulation that keeps all parts, on a new first dim.
STACK = "stack"

#: Returns its first argument, but not before the second is computed.
AFTER = "sbp.after"

#: A slice of a tensor, cut from the stored shards if possible.
PIECE = "sbp.piece"

# Our own, in plans.

#: Copies a state from host memory to the device: arguments are (state), and `device` by name.
TO_DEVICE = "sbp.to_device.default"

#: Copies the new value of a state that is in host memory to the host: arguments are (state, value).
TO_HOST = "sbp.to_host.default"

#: Does the same, and overwrites the old value.
TO_HOST_IN_PLACE = "sbp.to_host_.default"

#: Runs a local boxing step: arguments are (value, index into `plan.steps`).
LOCAL_BOX = "sbp.local_box"
