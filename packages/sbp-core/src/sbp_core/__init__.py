"""sbp-core: the SBP algebra, the logical graph, sharding propagation, the compiler, and interfaces.

All names are loaded lazily, when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room, moved_module

if TYPE_CHECKING:
    from sbp_core import boxing as boxing
    from sbp_core.cluster import Cluster as Cluster
    from sbp_core.cluster import Device as Device
    from sbp_core.cluster import Link as Link
    from sbp_core.cluster import LinkLevel as LinkLevel
    from sbp_core.compile import CompileOptions as CompileOptions
    from sbp_core.compile import compile_plan as compile_plan
    from sbp_core.infer import infer_strategy as infer_strategy
    from sbp_core.placement import Placement as Placement
    from sbp_core.plan_check import check as check
    from sbp_core.plan_request import PlanRequest as PlanRequest
    from sbp_core.sbp import B as B
    from sbp_core.sbp import NdSbp as NdSbp
    from sbp_core.sbp import P as P
    from sbp_core.sbp import S as S
    from sbp_core.signatures import legal_signatures as legal_signatures
    from sbp_core.strategy import Strategy as Strategy

__version__ = "0.1.0"

__all__ = [
    "B",
    "Cluster",
    "CompileOptions",
    "Device",
    "Link",
    "LinkLevel",
    "NdSbp",
    "P",
    "Placement",
    "PlanRequest",
    "S",
    "Strategy",
    "boxing",
    "check",
    "compile_plan",
    "infer_strategy",
    "legal_signatures",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    boxing="boxing",
    cluster="Cluster Device Link LinkLevel",
    compile="CompileOptions compile_plan",
    infer="infer_strategy",
    placement="Placement",
    plan_check="check",
    plan_request="PlanRequest",
    sbp="B NdSbp P S",
    signatures="legal_signatures",
    strategy="Strategy",
)

moved_module("sbp_core.check", "sbp_core.plan_check")
moved_module("sbp_core.simulate", "sbp_core.simulation")
moved_module("sbp_core.testing.cluster", "sbp_core.testing.cluster_suite")
