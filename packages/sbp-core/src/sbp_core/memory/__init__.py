"""The exact memory of a plan: lifetimes of storages, peaks of ranks, and purposes of the memory.

`predict_memory` (in `prediction`) puts it together, for planners and reports. `lifetime` finds when
each storage lives: `rank_events` orders the firings (executions of actors) of a rank and the
receives of its messages, and `storages` replays the rank in that order, with the help of a
`ledger`. `reports` finds the peaks by `memory_kinds`, and the profile over a step. The tensor
library computes how results are laid out in memory (`storage_view`). `kept_plans` caches plans and
their memory. `bound` is a cheap bound. `sbp_core.check` replays plans on `typed_values`.
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
