from __future__ import annotations

from sbp_core.graph.ir import Argument, Ref, Symbol, TensorType
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.signatures import (
    LocalCall,
    OpCall,
    RuleRegistry,
    localize,
)
from sbp_core.strategy import Signature

MESH = Placement.grid((2, 2), axes=("a", "b"))


def _call(
    op: str, inputs: dict[str, tuple[int, ...]], output: tuple[int, ...], *rest: Argument
) -> OpCall:
    return OpCall(
        op=op,
        args=(*map(Ref, inputs), *rest),
        kwargs={"dtype": Symbol("dtype", "float32")} if not inputs else {},
        inputs=tuple(TensorType(shape, "float32") for shape in inputs.values()),
        tensor_names=tuple(inputs),
        outputs=(TensorType(output, "float32"),),
    )


def signature(inputs: list[str], outputs: list[str]) -> Signature:
    return Signature(tuple(map(NdSbp.parse, inputs)), tuple(map(NdSbp.parse, outputs)))


def _local(call: OpCall, cut: Signature, rank: int, rules: RuleRegistry | None = None) -> LocalCall:
    """Return the only call that a rank executes."""
    (only,) = localize(call, cut, MESH, rank, rules=rules).calls
    return only


def test_a_range_starts_where_its_shard_starts() -> None:
    indices = _call("aten.arange.default", {}, (5,), 5)

    local = [_local(indices, signature([], ["S(0), B"]), rank) for rank in range(4)]

    assert [made.args for made in local] == [(0, 3, 1), (0, 3, 1), (3, 5, 1), (3, 5, 1)]
    assert {made.op for made in local} == {"aten.arange.start_step"}
    assert local[0].kwargs == indices.kwargs


def test_a_whole_range_runs_unchanged() -> None:
    indices = _call("aten.arange.default", {}, (5,), 5)

    assert _local(indices, signature([], ["B, B"]), 1).op == "aten.arange.default"
