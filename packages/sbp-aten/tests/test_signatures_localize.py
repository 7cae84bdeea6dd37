from __future__ import annotations

from sbp_core.placement import Placement
from sbp_core.signatures import (
    LocalCall,
    OpCall,
    RuleRegistry,
    localize,
)
from sbp_core.strategy import Signature
from sbp_core.testing.example_calls import call, signature

MESH = Placement.grid((2, 2), axes=("a", "b"))


def _local(call: OpCall, cut: Signature, rank: int, rules: RuleRegistry | None = None) -> LocalCall:
    """Return the only call that a rank executes."""
    (only,) = localize(call, cut, MESH, rank, rules=rules).calls
    return only


def test_a_range_starts_where_its_shard_starts() -> None:
    indices = call("aten.arange.default", {}, [(5,)], 5)

    local = [_local(indices, signature([], ["S(0), B"]), rank) for rank in range(4)]

    assert [made.args for made in local] == [(0, 3, 1), (0, 3, 1), (3, 5, 1), (3, 5, 1)]
    assert {made.op for made in local} == {"aten.arange.start_step"}
    assert local[0].kwargs == indices.kwargs


def test_a_whole_range_runs_unchanged() -> None:
    indices = call("aten.arange.default", {}, [(5,)], 5)

    assert _local(indices, signature([], ["B, B"]), 1).op == "aten.arange.default"
