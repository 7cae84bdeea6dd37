"""`segment_maker`: choose eager mode, Inductor or CUDA graphs for segments (setting `compile`).

A segment is a list of operators without communication in between. A runtime calls `segment_maker`
once in each session. The functions that it creates have one interface, so the runtime does not
depend on the choice. Inductor is imported only if it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sbp_core.boxing import BoxingStep
from sbp_core.compile import Compute
from sbp_torch.segments.codegen import segment_function
from sbp_torch.segments.execution_options import Execution

#: The function of a segment: values of inputs and reads -> values of `keys_out`. It empties the
#: list, so that a value without other references is freed after its last use.
OwningSegment = Callable[[list[Any]], tuple[Any, ...]]

#: (compute actor, rank, boxing steps of the plan) -> function of its segment. Called once for each
#: actor, before the first step.
SegmentMaker = Callable[[Compute, int, Sequence[BoxingStep]], OwningSegment]


def segment_maker(execution: Execution, *, fallback: bool = False) -> SegmentMaker:
    """Return the function that creates the functions of a session's segments.

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
