"""Write and read a `LogicalGraph` as JSON, and hash it stably.

The hash covers the computation and the names of a graph, but not the line numbers of user code.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

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


def to_json(graph: LogicalGraph) -> dict[str, Any]:
    """Return a JSON value that `from_json` reads."""
    return GRAPH.dump(graph)


def from_json(value: object) -> LogicalGraph:
    """Read the result of `to_json`. `graph.spec` can then verify the graph.

    Raises:
        GraphError: it is not a graph, or was written by another version.
    """
    return GRAPH.load(value)


def graph_hash(graph: LogicalGraph) -> str:
    """Return 16 hex digits that depend on the computation of the graph, not on source lines."""
    if graph_hash not in graph.found:
        value = to_json(graph)
        for node in value["nodes"]:
            node.pop("source", None)
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        graph.found[graph_hash] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return str(graph.found[graph_hash])
