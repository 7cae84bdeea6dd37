"""Write and read a `LogicalGraph` as JSON, and hash it stably.

The hash covers what the graph computes and its names, not where its lines stand in files. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sbp_core.errors import GraphError
from sbp_core.graph.ir import (
    Argument,
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    ScalarType,
    Symbol,
    TensorType,
    ValueType,
)

FORMAT = 1


def argument_to_json(argument: Argument) -> Any:
    """Return a JSON value; `Ref` and `Symbol` become one-key objects, tuples lists."""
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Symbol):
        return {argument.kind: argument.name}
    if isinstance(argument, tuple):
        return [argument_to_json(part) for part in argument]
    if isinstance(argument, float) and argument in (float("inf"), float("-inf")):
        return {"float": str(argument)}
    if isinstance(argument, float) and argument != argument:
        return {"float": "nan"}
    return argument


def argument_from_json(value: Any) -> Argument:
    """Read what `argument_to_json` wrote."""
    if isinstance(value, dict):
        ((kind, name),) = value.items()
        if kind == "float":
            return float(name)
        return Ref(name) if kind == "ref" else Symbol(kind, name)
    if isinstance(value, list):
        return tuple(argument_from_json(part) for part in value)
    return value


def _type_to_json(kind: ValueType) -> list[Any]:
    return [kind.dtype, list(kind.shape)] if isinstance(kind, TensorType) else [kind.dtype]


def _type_from_json(value: list[Any]) -> ValueType:
    return TensorType(tuple(value[1]), value[0]) if len(value) == 2 else ScalarType(value[0])


def _node_to_json(node: Node) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "args": argument_to_json(node.args),
        "kwargs": {key: argument_to_json(part) for key, part in node.kwargs.items()},
        "outputs": list(node.outputs),
        "phase": node.phase.value,
        "rate": node.rate.value,
        "module": node.module,
        "source": node.source,
        "forward": node.forward,
        "tags": list(node.tags),
    }
    return {key: part for key, part in value.items() if part or key in ("args", "outputs")}


def _node_from_json(value: Mapping[str, Any]) -> Node:
    return Node(
        name=value["name"],
        op=value["op"],
        args=argument_from_json(value["args"]),
        kwargs={key: argument_from_json(part) for key, part in value.get("kwargs", {}).items()},
        outputs=tuple(value["outputs"]),
        phase=Phase(value["phase"]),
        rate=Rate(value["rate"]),
        module=value.get("module", ""),
        source=value.get("source", ""),
        forward=value.get("forward", ""),
        tags=tuple(value.get("tags", ())),
    )


def to_json(graph: LogicalGraph) -> dict[str, Any]:
    """Return a JSON value that `from_json` reads."""
    return {
        "format": FORMAT,
        "name": graph.name,
        "num_micro_batches": graph.num_micro_batches,
        "inputs": [
            {
                "name": entry.name,
                "kind": entry.kind.value,
                "of": entry.of,
                "stands_for": list(entry.stands_for),
            }
            for entry in graph.inputs
        ],
        "outputs": [
            {"name": entry.name, "kind": entry.kind.value, "value": entry.value}
            for entry in graph.outputs
        ],
        "nodes": [_node_to_json(node) for node in graph.nodes],
        "types": {name: _type_to_json(kind) for name, kind in graph.types.items()},
    }


def from_json(value: Mapping[str, Any]) -> LogicalGraph:
    """Read what `to_json` wrote.

    Raises:
        GraphError: the format is another one.
    """
    if value.get("format") != FORMAT:
        raise GraphError(
            f"a graph of format {value.get('format')!r}",
            accepted=f"format {FORMAT}",
            todo="capture again with this version",
        )
    return LogicalGraph(
        name=value["name"],
        num_micro_batches=value["num_micro_batches"],
        inputs=tuple(
            GraphInput(
                name=entry["name"],
                kind=InputKind(entry["kind"]),
                of=entry["of"],
                stands_for=tuple(entry["stands_for"]),
            )
            for entry in value["inputs"]
        ),
        outputs=tuple(
            GraphOutput(name=entry["name"], kind=OutputKind(entry["kind"]), value=entry["value"])
            for entry in value["outputs"]
        ),
        nodes=tuple(map(_node_from_json, value["nodes"])),
        types={name: _type_from_json(kind) for name, kind in value["types"].items()},
    )


def graph_hash(graph: LogicalGraph) -> str:
    """Return 16 hex digits that change with what the graph computes, not with source lines."""
    value = to_json(graph)
    for node in value["nodes"]:
        node.pop("source", None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
