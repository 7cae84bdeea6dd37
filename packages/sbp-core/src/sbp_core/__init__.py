"""sbp-core: the algebra, the graph, the compiler, the contracts, the reference runtime.

Everything is loaded when first used; importing this package imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sbp_core import boxing as boxing
    from sbp_torch.capture import capture as capture
    from sbp_torch.capture import initial_states as initial_states
    from sbp_core.check import check as check
    from sbp_core.compile import CompileOptions as CompileOptions
    from sbp_core.compile import compile_plan as compile_plan
    from sbp_aten.passes import prepare_step as prepare_step
    from sbp_core.infer import infer_strategy as infer_strategy
    from sbp_core.placement import Cluster as Cluster
    from sbp_core.placement import Device as Device
    from sbp_core.placement import Link as Link
    from sbp_core.placement import Placement as Placement
    from sbp_core.plugins.kinds import PlanRequest as PlanRequest
    from sbp_core.sbp import B as B
    from sbp_core.sbp import NdSbp as NdSbp
    from sbp_core.sbp import P as P
    from sbp_core.sbp import S as S
    from sbp_core.signatures import signatures as signatures
    from sbp_core.strategy import Strategy as Strategy

__version__ = "0.1.0"

_HOMES = {
    "B": "sbp",
    "Cluster": "placement",
    "CompileOptions": "compile",
    "Device": "placement",
    "Link": "placement",
    "NdSbp": "sbp",
    "P": "sbp",
    "PlanRequest": "plugins.kinds",
    "Placement": "placement",
    "S": "sbp",
    "Strategy": "strategy",
    "compile_plan": "compile",
    "infer_strategy": "infer",
    "initial_states": "capture",
    "prepare_step": "graph.passes",
}

#: Modules that are also called: `check(plan)`, `capture(model, ...)`, `signatures(op, ...)`.
_MODULES = ("boxing", "capture", "check", "signatures")

__all__ = sorted((*_HOMES, *_MODULES))


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"sbp_core.{name}")
    if name in _HOMES:
        return getattr(import_module(f"sbp_core.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'sbp_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
