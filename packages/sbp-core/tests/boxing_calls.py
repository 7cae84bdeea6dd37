"""Boxing steps and calls of three ranks, for tests of what waits for them."""

from __future__ import annotations

import time

from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.boxing.router import route
from sbp_core.boxing.step import BoxingStep
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, Sbp


def only_step(before: Sbp, after: Sbp, sources: list[int], targets: list[int]) -> BoxingStep:
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route((4, 2), "float32", (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def call_of(age_s: float = 0.0, rank: int = 0, tag: str = "grad") -> CollectiveCall:
    step = only_step(P, B, [0, 1, 2], [0, 1, 2])
    return CollectiveCall(
        step=step, tag=tag, rank=rank, deadline_s=60.0, end_s=time.monotonic() - age_s + 60.0
    )
