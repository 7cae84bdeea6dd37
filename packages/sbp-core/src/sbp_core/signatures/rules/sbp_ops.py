"""Our own operators, but for those that draw random numbers (`random`)."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.signatures.notation import linear
from sbp_core.signatures.rule import Rule
from sbp_core.signatures.rules.pointwise import broadcasting

#: `sbp.accumulate(x, scale)`: the sum over the micro-batches of a step of scale·x; each rank sums
#: what it holds, so it is linear. It is not monotone: a sum of maxima is no maximum of sums.
RULES = {"sbp.accumulate": Rule(lambda call: replace(broadcasting(call), dependences=(linear(0),)))}
