"""Plugin hooks of sbp-aten: they register the sharding rules of ATen's operators."""

from __future__ import annotations

from collections.abc import Mapping

from sbp_core.plugins import Factory, hookimpl

SBP_API_VERSION = 2

#: Namespaces of the operators that have rules here; passes write the operators of `sbp`.
_NAMESPACES = ("aten", "sbp", "torch_nn")


@hookimpl
def sbp_signatures() -> Mapping[str, Factory]:
    """Register one rule set for all namespaces."""
    rules = Factory(build="sbp_aten.rules:build", summary="the rules of ATen's operators")
    return dict.fromkeys(_NAMESPACES, rules)
