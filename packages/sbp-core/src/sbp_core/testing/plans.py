"""Hand-made strategies, and plans compiled from them or from inferred ones, on hand-made graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.physical import PhysicalPlan, RankPlan, StateSlot
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_request import PlanRequest
from sbp_core.sbp import B, NdSbp, local_shape
from sbp_core.strategy import Assignment, Signature, Storage, Strategy
from sbp_core.testing.graphs import Builder, cluster, mlp

__all__ = ["LINE", "batch_plan", "data_parallel_plan", "diamond", "pipeline_plan", "strategy_of"]

LINE = Placement.grid((2,), ("data",))


def strategy_of(
    graph: LogicalGraph,
    stages: Sequence[Placement] = (LINE,),
    *,
    signatures: Mapping[str, str] | None = None,
    storage: Mapping[str, str] | None = None,
    node_stages: Mapping[str, int] | None = None,
    input_stages: Mapping[str, int] | None = None,
    in_flight: Sequence[int] | None = None,
) -> Strategy:
    """Return a strategy; ops and inputs that are not named are B on stage 0.

    Signatures are written `"S(0) | B -> S(0)"`, with `|` between tensors.
    """

    def sbps(text: str) -> tuple[NdSbp, ...]:
        return tuple(NdSbp.parse(part) for part in text.split("|") if part.strip())

    nodes = {}
    for node in graph.nodes:
        if node.is_host:
            continue
        stage = (node_stages or {}).get(node.name, 0)
        whole = NdSbp(*[B] * stages[stage].num_axes)
        signature = Signature(
            tuple(whole for _ in graph.tensor_inputs(node)), tuple(whole for _ in node.outputs)
        )
        written = (signatures or {}).get(node.name)
        if written is not None:
            left, right = written.split("->")
            signature = Signature(sbps(left), sbps(right))
        nodes[node.name] = Assignment(stage=stage, signature=signature)
    stored = {}
    for entry in graph.inputs:
        if graph.is_tensor(entry.name):
            stage = (input_stages or {}).get(entry.name, 0)
            whole = NdSbp(*[B] * stages[stage].num_axes)
            text = (storage or {}).get(entry.name)
            stored[entry.name] = Storage(stage=stage, sbp=NdSbp.parse(text) if text else whole)
    return Strategy(
        planner="by hand",
        graph_hash=graph_hash(graph),
        stages=tuple(stages),
        num_micro_batches=graph.num_micro_batches,
        nodes=nodes,
        storage=stored,
        in_flight=tuple(in_flight or [graph.num_micro_batches] * len(stages)),
    )


def diamond() -> LogicalGraph:
    """Return y = x w; a = relu(y); b = neg(y); loss = sum(a + b); g = mm(y, w) backward."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("w")), (4, 4))
    b.op("a", "relu.default", (Ref("y"),), (4, 4), pointwise=True)
    b.op("b", "neg.default", (Ref("y"),), (4, 4), pointwise=True)
    b.op("c", "add.Tensor", (Ref("a"), Ref("b")), (4, 4), pointwise=True)
    b.op("loss", "sum.default", (Ref("c"),), ())
    b.op("g", "mm.default", (Ref("y"), Ref("w")), (4, 4), phase=Phase.BACKWARD)
    b.op("new", "sub.Tensor", (Ref("w"), Ref("g")), (4, 4), phase=Phase.OPTIMIZER, pointwise=True)
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="new"))
    return b.graph("diamond")


def pipeline_plan(
    num_micro_batches: int,
    in_flight: tuple[int, ...],
    *,
    mesh: Placement | None = None,
    widths: Sequence[int] = (4, 8, 4),
    options: CompileOptions | None = None,
    batch: int = 8,
    num_updates: int = 1,
    staleness: tuple[int, ...] = (),
) -> PhysicalPlan:
    """Return the plan of an MLP with one stage for each number in `in_flight`."""
    mesh = mesh or Placement.grid((len(in_flight),), ("pipe",))
    graph = mlp(widths, batch, num_micro_batches, num_updates)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    pins = {"batch": "S(0)"} if mesh.num_axes > 1 else {}
    strategy = infer_strategy(
        request, planner="test", pins=pins, in_flight=in_flight, staleness=staleness
    )
    return compile_plan(graph, strategy, options)


def data_parallel_plan(options: CompileOptions | None = None) -> PhysicalPlan:
    """Return the plan of an MLP on two ranks, each with half of the batch."""
    graph = mlp()
    request = PlanRequest(graph=graph, mesh=LINE, cluster=cluster())
    pins = {"batch": "S(0)", "parameters": "B"}
    return compile_plan(graph, infer_strategy(request, planner="test", pins=pins), options)


def batch_plan(
    stages: Sequence[Placement],
    tensors: Mapping[str, tuple[int, str, tuple[int, ...]]],
    count: int = 1,
) -> PhysicalPlan:
    """Return a plan without actors that only has batch tensors.

    Args:
        stages: The stages of the plan.
        tensors: The tensors of one micro-batch: name -> (stage, nd-SBP, shape).
        count: The number of micro-batches.
    """

    def slots(rank: int) -> tuple[StateSlot, ...]:
        return tuple(
            StateSlot(
                name=name,
                kind=InputKind.BATCH,
                shape=shape,
                dtype="float32",
                stage=stage,
                sbp=NdSbp.parse(sbp),
                local_shape=local_shape(
                    shape,
                    NdSbp.parse(sbp),
                    stages[stage].mesh_shape,
                    stages[stage].coordinate(rank),
                ),
            )
            for name, (stage, sbp, shape) in tensors.items()
            if rank in stages[stage]
        )

    ranks = sorted({rank for stage in stages for rank in stage.rank_list})
    return PhysicalPlan(
        graph_hash="",
        planner="",
        num_micro_batches=count,
        ties={},
        stages=tuple(stages),
        steps=(),
        links=(),
        ranks=tuple(
            RankPlan(rank=rank, slots=slots(rank), actors=(), registers=(), orders={})
            for rank in ranks
        ),
    )
