"""Write and read a `LogicalGraph` as JSON, and hash it stably.

The hash covers the computation and the names of a graph, but not the line numbers of user code.
"""

from __future__ import annotations

import hashlib
import json

from sbp_core.errors import GraphError
from sbp_core.graph.ir import LogicalGraph
from sbp_core.serialize import Document

#: The file of a graph.
GRAPH = Document(
    kind=LogicalGraph,
    format="sbp-graph",
    version=2,
    todo="capture again with this version",
    error=GraphError,
    most_bytes=2**30,
)


def graph_hash(graph: LogicalGraph) -> str:
    """Return 16 hex digits that depend on the computation of the graph, not on source lines."""
    if graph_hash not in graph.found:
        value = GRAPH.dump(graph)
        for node in value["nodes"]:
            node.pop("source", None)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        graph.found[graph_hash] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return str(graph.found[graph_hash])
