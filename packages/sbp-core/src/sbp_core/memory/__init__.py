"""The memory of a plan: lifetimes, peaks, and purposes.

`lifetime` says when each storage lives: `rank_events` finds in which order a rank fires and others
take what it sent, `storages` replays the rank in that order, by a `ledger`. `reports` has what that
comes to, by `memory_kinds`, and how it rises and falls over a step. How results are laid out in
memory is known to the tensor library (`storage_view`); `prediction` puts all of it together, with
what transports between processes hold besides, and `kept_plans` keeps that for plans that were
considered. `bound` says without it what memory cannot exceed. `typed_values` are what
`sbp_core.check` replays a plan on.
"""

from __future__ import annotations

from sbp_core.memory.bound import memory_bound, offloaded_bytes
from sbp_core.memory.kept_plans import KeptPlans
from sbp_core.memory.lifetime import lifetimes
from sbp_core.memory.memory_kinds import MemoryKind
from sbp_core.memory.prediction import buffer_bytes, call_layouts, predict_memory
from sbp_core.memory.reports import (
    MemoryProfile,
    MemoryReport,
    RankMemory,
    check_memory,
    memory_profile,
    peak_text,
    report,
)
from sbp_core.memory.storage_view import (
    CallLayouts,
    LayoutLibrary,
    Number,
    ResultLayout,
    StorageView,
    StridedLayout,
    contiguous,
)
from sbp_core.memory.storages import RankLifetimes
from sbp_core.memory.typed_values import CountedFillings, TypedValues, installed_layouts

__all__ = [
    "CallLayouts",
    "CountedFillings",
    "KeptPlans",
    "LayoutLibrary",
    "MemoryKind",
    "MemoryProfile",
    "MemoryReport",
    "Number",
    "RankLifetimes",
    "RankMemory",
    "ResultLayout",
    "StorageView",
    "StridedLayout",
    "TypedValues",
    "buffer_bytes",
    "call_layouts",
    "check_memory",
    "contiguous",
    "installed_layouts",
    "lifetimes",
    "memory_bound",
    "memory_profile",
    "offloaded_bytes",
    "peak_text",
    "predict_memory",
    "report",
]
