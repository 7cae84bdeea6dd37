"""Our own operators."""

from __future__ import annotations

from sbp_core.signatures.rules.pointwise import POINTWISE

#: `sbp.accumulate(x, scale)`: the sum over the micro-batches of a step of scale·x; each rank sums
#: what it holds, so it is pointwise, and linear.
RULES = {"sbp.accumulate": POINTWISE}
