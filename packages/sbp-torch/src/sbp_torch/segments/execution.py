"""What makes the functions of segments, by the setting `compile`.

A runtime asks `segment_maker` once a session for what makes the functions of its segments, and
calls them alike. Inductor is imported only where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sbp_core.boxing import BoxingStep
from sbp_core.compile import Compute
from sbp_torch.segments.codegen import segment_function
from sbp_torch.segments.execution_options import Execution

#: The function of a segment: returns the values of `keys_out`. It takes those of inputs and reads,
#: and empties the list, so that a value that nobody else holds dies after its last use.
OwningSegment = Callable[[list[Any]], tuple[Any, ...]]

#: Makes the function of a compute actor on one rank, given the steps of the plan; called once for
#: each, before the first step.
SegmentMaker = Callable[[Compute, int, Sequence[BoxingStep]], OwningSegment]


def segment_maker(execution: Execution, *, fallback: bool = False) -> SegmentMaker:
    """Return what makes the functions of a session's segments.

    Raises:
        ConfigError: this machine lacks what the setting needs: a C++ compiler, or a GPU.
    """
    if execution == "inductor":
        from sbp_torch.segments.inductor import InductorSegments

        return InductorSegments(fallback=fallback)
    if execution == "cudagraph":
        from sbp_torch.segments.cudagraph import GraphSegments

        return GraphSegments()
    return partial(segment_function, owns=True)
