"""Execute compute segments: as generated Python, compiled by Inductor, or as CUDA graphs.

A segment is a list of operators that a rank runs without communication in between. `execution`
chooses the method; `codegen`, `inductor` and `cudagraph` create the functions, the last two for the
tensor part of a segment (`host_parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

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

__getattr__, __dir__ = lazy_room(
    __name__,
    codegen="TellingSegment TimedSegment failed_call operator_clock segment_function "
    "telling_segment_function timed_segment_function",
    execution="OwningSegment SegmentMaker segment_maker",
)
