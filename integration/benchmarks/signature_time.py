"""Time deriving the signatures of a whole training step: a GPT of 32 layers, some 5,000 nodes.

`nox -s benchmarks`, or this script with the number of layers as argument. Prints seconds with empty
caches (equal calls are derived once) and again with full ones, for mesh axes of 2 and 4 ranks, and
for a third pass that enumerates the n-D signatures of every distinct call on a 2x4 mesh. Nothing is
asserted, because machines differ.
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from typing import Any

import torch

from sbp_aten.passes import prepare_step
from sbp_core.graph import LogicalGraph
from sbp_core.plugins import discover
from sbp_core.signatures import OpCall, call_key, derive, enumerate_signatures
from sbp_torch.graph_capture import capture

BATCH_SIZE, CONTEXT = 4, 32
AXIS_SIZES, MESH_SHAPE = (2, 4), (2, 4)

#: The greatest number of signatures per distinct call; there may be thousands.
MOST_ND = 1000


def model_loss(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    return model.loss(batch)


def step_graph(layers: int) -> LogicalGraph:
    """Capture a training step of a narrow GPT with AdamW."""
    torch.manual_seed(0)
    model = discover().make(
        "model", "gpt", {"num_layers": layers, "hidden": 32, "num_heads": 4, "context": CONTEXT}
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.zeros(BATCH_SIZE, CONTEXT, dtype=torch.int64)
    batch = {"tokens": tokens, "targets": tokens}
    return prepare_step(capture(model, model_loss, batch, optimizer))


def main() -> None:
    layers = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    graph = step_graph(layers)
    calls = [OpCall.of(graph, node) for node in graph.nodes if not node.is_host]
    distinct = {call_key(call): call for call in calls}
    print(f"{len(graph.nodes)} nodes, {len(calls)} calls, {len(distinct)} of them distinct")
    for turn in ("empty caches", "full caches"):
        start = time.perf_counter()
        count = sum(len(derive(call, size)) for call in calls for size in AXIS_SIZES)
        seconds = time.perf_counter() - start
        print(f"{turn}: {count} signatures on axes of {AXIS_SIZES} ranks in {seconds:.2f} s")
    start = time.perf_counter()
    count = sum(
        sum(1 for _ in islice(enumerate_signatures(call, MESH_SHAPE), MOST_ND))
        for call in distinct.values()
    )
    seconds = time.perf_counter() - start
    print(f"{count} n-D signatures of the distinct calls on {MESH_SHAPE} in {seconds:.2f} s")


if __name__ == "__main__":
    main()
