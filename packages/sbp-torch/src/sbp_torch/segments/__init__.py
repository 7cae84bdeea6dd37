"""How compute segments are executed: as generated Python, by Inductor, or as CUDA graphs.

`execution` chooses; `codegen`, `inductor` and `cudagraph` make the functions, the last two of what
`split` leaves of a segment.

Stability: internal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_torch.segments.codegen import (
        TellingSegment,
        TimedSegment,
        failed_call,
        operator_clock,
        segment_function,
        telling_segment_function,
        timed_segment_function,
    )
    from sbp_torch.segments.execution import OwningSegment, SegmentMaker, segment_maker

__all__ = [
    "OwningSegment",
    "SegmentMaker",
    "TellingSegment",
    "TimedSegment",
    "failed_call",
    "operator_clock",
    "segment_function",
    "segment_maker",
    "telling_segment_function",
    "timed_segment_function",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "OwningSegment": "execution",
        "SegmentMaker": "execution",
        "TellingSegment": "codegen",
        "TimedSegment": "codegen",
        "failed_call": "codegen",
        "operator_clock": "codegen",
        "segment_function": "codegen",
        "segment_maker": "execution",
        "telling_segment_function": "codegen",
        "timed_segment_function": "codegen",
    },
)
