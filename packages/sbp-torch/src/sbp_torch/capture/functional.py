"""Remove the mutations of a traced graph: every op then makes new tensors only.

before: h = mul_(w, 0.9); add_(h, g); return w        w, h and the result of add_ are one tensor
after:  h = mul(w, 0.9);  i = add(h, g); return i

Two ways. `rewrite_mutations` renames: what reads a tensor after a write reads what the write made.
It is quick, and declines where a tensor is written to through a view, or a view of it is read after
the write. `retrace` lets PyTorch do it by tracing once more, which is right for everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from sbp_core.errors import CaptureError
from sbp_torch._torch_compat import (
    OpOverload,
    base_name,
    functional_graph,
    functional_overload,
    is_mutable,
    view_source,
    written_argument,
    written_arguments,
)

_aten = torch.ops.aten


def make_functional(first: fx.GraphModule, num_states: int) -> fx.GraphModule:
    """Return the graph without mutations, without copies of its inputs, and without `detach`.

    Args:
        first: As traced; left as it is, or used up.
        num_states: How many of its placeholders, the first ones, may be written to.

    Raises:
        CaptureError: it writes to a tensor that is none of its arguments, and that outlives it.
    """
    check_writes(first.graph)
    second = rewrite_mutations(first) or retrace(first, num_states)
    for node in second.graph.nodes:
        if node.op != "call_function":
            continue
        copied = node.target is _aten.clone.default and not node.kwargs
        if (copied and node.args[0].op == "placeholder") or node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        if node.target is _aten.copy.default and _is_alike(*node.args[:2]):
            node.replace_all_uses_with(node.args[1])
    # Nobody calls it: its code, which torch would write anew, may be that of before.
    second.graph.eliminate_dead_code()
    return second


def check_writes(graph: fx.Graph) -> None:
    """Refuse writes to what the program holds beside its states: nothing would carry them on.

    Raises:
        CaptureError: there is one; says at which line.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = view_source(node)
        roots[node] = node if source is None else roots[source]
        target: Any = node.target
        if not isinstance(target, OpOverload) or not is_mutable(target):
            continue
        for written in written_arguments(target, node.args, node.kwargs, fx.Node):
            if roots[written].op == "get_attr":
                note = node.meta.get("custom", {}).get("sbp", {})
                raise written_outside(target, note.get("source", ""))


def written_outside(op: OpOverload, where: str) -> CaptureError:
    """Return the error for a write to what is no state, no input, and not made by the step."""
    return CaptureError(
        f"{base_name(op)} changes a tensor in place that is no parameter, buffer or input, and "
        "outlives the step",
        where=where,
        accepted="in-place changes of buffers, and of tensors that the step makes",
        todo="register the tensor with register_buffer, or change a copy: .clone()",
    )


def retrace(first: fx.GraphModule, num_states: int) -> fx.GraphModule:
    """Trace once more with mutations replayed; states are cloned at the door."""
    placeholders = [node.meta["val"] for node in first.graph.nodes if node.op == "placeholder"]

    def run(*values: Tensor) -> Any:
        states = [value.clone() for value in values[:num_states]]
        interpreter = fx.Interpreter(first)
        return interpreter.run(*states, *values[num_states:], enable_io_processing=False)

    return functional_graph(run, placeholders)


def rewrite_mutations(first: fx.GraphModule) -> fx.GraphModule | None:
    """Rename after each write; None, and nothing changed, if that is not enough."""
    writes = _writes(first.graph)
    if writes is None:
        return None
    now: dict[fx.Node, fx.Node] = {}
    for node in list(first.graph.nodes):
        node.args = fx.map_arg(node.args, lambda used: now.get(used, used))
        node.kwargs = fx.map_arg(node.kwargs, lambda used: now.get(used, used))
        if node not in writes:
            continue
        target, functional = writes[node]
        with first.graph.inserting_before(node):
            made = first.graph.call_function(functional, node.args, dict(node.kwargs))
        made.meta = dict(node.meta)
        now[target] = now[node] = made
    for node in reversed(list(writes)):
        first.graph.erase_node(node)
    return first


def _writes(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, OpOverload]] | None:
    """Return for each write the tensor it writes to and the op that makes a new one instead.

    None, if a write is seen by a tensor that is not that one.
    """
    nodes = list(graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max((place[user] for user in node.users), default=-1) for node in nodes}
    roots: dict[fx.Node, fx.Node] = {}
    families: dict[fx.Node, list[fx.Node]] = {}
    found: dict[fx.Node, tuple[fx.Node, OpOverload]] = {}
    for node in nodes:
        target: Any = node.target
        if isinstance(target, OpOverload) and is_mutable(target):
            written, functional = written_argument(target), functional_overload(target)
            if written is None or functional is None or not _is_alike(node.args[written], node):
                return None
            through = node.args[written]
            root = roots[through]
            if (through is not root and through not in found) or any(
                last_use[other] > place[node]
                for other in families[root]
                if other is not root and other not in found
            ):
                return None
            found[node] = (root, functional)
        else:
            source = view_source(node)
            root = node if source is None else roots[source]
        roots[node] = root
        families.setdefault(root, []).append(node)
    return found


def _is_alike(first: Any, second: Any) -> bool:
    """Whether two nodes make tensors of one shape and dtype."""
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return False
    a, b = first.meta.get("val"), second.meta.get("val")
    return (
        isinstance(a, Tensor) and isinstance(b, Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
    )


def tensors_by_name(module: fx.GraphModule) -> Mapping[str, Tensor]:
    """Return the tensors that a graph holds itself, by the name of the attribute."""
    return {
        node.target: getattr(module, node.target)
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
