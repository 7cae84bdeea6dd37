"""The search around all planners, and the tools that they share.

A planner is a `SearchedPlanner`: it proposes a strategy in a `PlanContext`, by the method of its
paper. The search compiles the proposal and compares it with the memory of the ranks (`compiled`).
Where that is short, it makes buckets smaller (`bucket_fit`) and places states in host memory, which
a setting may also ask for (`search`, `host_states`, `offload_fit`). Variants of a step that need
less memory are in `variants`.

`offload_setting` is for the configs of planners and imports nothing slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_core.plan_request import Planner as Planner
    from sbp_core.plan_request import PlanRequest as PlanRequest
    from sbp_core.planning.bucket_fit import best_buckets, told_buckets
    from sbp_core.planning.compiled import Compilation, Compiled, limit_key
    from sbp_core.planning.host_states import offloaded_states, offloading, with_states
    from sbp_core.planning.limit_search import LimitSearch, search_limits
    from sbp_core.planning.offload_fit import until_it_fits
    from sbp_core.planning.offload_setting import Offload, Offloads, check_host, check_offload
    from sbp_core.planning.search import PlanContext, SearchedPlanner, fitted, may_offload
    from sbp_core.planning.variants import (
        forms_of,
        leaner_forms,
        recompute_budgets,
        requests_of,
        smaller_variants,
        splits_classes,
        variant_words,
        variants_of,
    )

__all__ = [
    "Compilation",
    "Compiled",
    "LimitSearch",
    "Offload",
    "Offloads",
    "PlanContext",
    "PlanRequest",
    "Planner",
    "SearchedPlanner",
    "best_buckets",
    "check_host",
    "check_offload",
    "fitted",
    "forms_of",
    "leaner_forms",
    "limit_key",
    "may_offload",
    "offloaded_states",
    "offloading",
    "recompute_budgets",
    "requests_of",
    "search_limits",
    "smaller_variants",
    "splits_classes",
    "told_buckets",
    "until_it_fits",
    "variant_words",
    "variants_of",
    "with_states",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    bucket_fit="best_buckets told_buckets",
    compiled="Compilation Compiled limit_key",
    limit_search="LimitSearch search_limits",
    offload_fit="until_it_fits",
    offload_setting="Offload Offloads check_host check_offload",
    host_states="offloaded_states offloading with_states",
    search="PlanContext SearchedPlanner fitted may_offload",
    variants="forms_of leaner_forms recompute_budgets requests_of smaller_variants "
    "splits_classes variant_words variants_of",
    **{"sbp_core.plan_request": "PlanRequest Planner"},
)
