"""What the tests of planners ask for: a captured training step of a GPT, on meshes of a machine.

`data/gpt_step.json` is the step of a GPT with one layer, 16 hidden units, 4 heads, 32 tokens,
context 8 and AdamW, at micro-batch size 8 and two micro-batches a step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sbp_core.boxing import route
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.graph import GRAPH
from sbp_core.graph.ir import LogicalGraph, Phase
from sbp_core.infer import conversions
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.signatures.axes import enumerate_signatures
from sbp_core.signatures.call import OpCall
from sbp_core.strategy import Strategy


def gpt_step() -> LogicalGraph:
    """Return the captured step."""
    text = Path(__file__).with_name("data").joinpath("gpt_step.json").read_text(encoding="utf-8")
    return GRAPH.load(json.loads(text))


def cluster() -> Cluster:
    """Return a machine on which small plans are neither all compute nor all latency."""
    return Cluster(
        name="test",
        num_devices=8,
        devices_per_node=8,
        device=Device(
            memory_bytes=1 << 30,
            flop_per_s={"float32": 1e8},
            memory_bytes_per_s=1e8,
            launch_s=1e-6,
        ),
        intra_node=Link(latency_s=1e-6, bytes_per_s=1e7),
    )


def request(
    mesh_shape: Sequence[int], axes: Sequence[str], pins: Mapping[str, str] | None = None
) -> PlanRequest:
    """Return the request to plan the step on ranks 0, 1, 2, ..."""
    return PlanRequest(
        graph=gpt_step(),
        mesh=Placement.grid(mesh_shape, axes),
        cluster=cluster(),
        pins=pins or {},
    )


def collectives(graph: LogicalGraph, strategy: Strategy, *phases: Phase) -> Counter[str]:
    """Count the boxing steps on values that nodes of some phases make, by kind."""
    found: Counter[str] = Counter()
    for conversion in conversions(graph, strategy):
        producer = graph.producers.get(conversion.value)
        if phases and (producer is None or producer.phase not in phases):
            continue
        tensor = graph.tensor(conversion.value)
        (source, before), (target, after) = conversion.source, conversion.target
        ends = (strategy.stages[source], before), (strategy.stages[target], after)
        found.update(step.kind.value for step in route(tensor.shape, tensor.dtype, *ends).steps)
    return found


def assert_legal(graph: LogicalGraph, strategy: Strategy) -> None:
    """Check every node against the signatures of its operator on the whole mesh."""
    for node in graph.nodes:
        if not node.is_host:
            found = strategy.nodes[node.name]
            mesh_shape = strategy.stages[found.stage].mesh_shape
            legal = set(enumerate_signatures(OpCall.of(graph, node), mesh_shape))
            assert found.signature in legal, node.name
