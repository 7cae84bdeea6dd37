"""Trace a whole training step to one functional FX graph.

`make_fx` runs the user's Python (forward, loss, `autograd.grad`, the update) on fake tensors with
all states swapped in. The graph computes the same as eager mode, bit for bit, except for random
numbers (see `randomness`). Then mutations are removed, so that every op only makes new tensors:

before: h = mul_(w, 0.9); add_(h, g); return w        w, h and the result of add_ are one tensor
after:  h = mul(w, 0.9);  i = add(h, g); return i

There are two ways. `rewrite_mutations` renames: a node that reads a tensor after a write reads the
result of the write. It is quick, but gives up if a tensor is written to through a view, or a view
of it is read after the write. `retrace` lets PyTorch remove mutations by tracing again, which
always works. `fx_conversion` turns the result into our IR.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from sbp_core.errors import CaptureError
from sbp_core.graph import GraphInput, OutputKind
from sbp_torch._torch_compat import (
    OpOverload,
    fake_mode,
    functional_graph,
    functional_overload,
    is_mutable,
    storage_key,
    trace_graph,
    view_source,
    written_argument,
    written_arguments,
)
from sbp_torch.graph_capture.diagnostics import check_dense, refusal, written_outside
from sbp_torch.graph_capture.side_effects import shared_memory
from sbp_torch.graph_capture.step import TraceableStep

# Tracing and constructing an optimizer load it. Import it here, while collection is paused.


_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A functional FX graph, and descriptions of its placeholders and outputs, in order.

    `constants` are the tensors that the program made before the trace, by the name of the graph's
    attribute. `update_source` is the `file:line` of the optimizer's definition. `form` is the
    graph in comparable form; only for a step whose forward has side effects, or a step that is
    traced after the side effects of an earlier one.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[tuple[str, OutputKind], ...]
    constants: Mapping[str, Tensor]
    update_source: str = ""
    form: tuple[Any, ...] = ()


def trace_step(step: TraceableStep) -> TracedStep:
    """Trace a step as one FX graph.

    Raises:
        CaptureError: the step cannot be traced; the error names the line of the user's code, and
            what to change.
    """
    mode = fake_mode()

    def fake(tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # in a deferred model, which has no values yet
            with mode:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        return mode.from_tensor(tensor.detach(), static_shapes=True)

    def fake_state(tensor: Tensor) -> Tensor:
        if tensor.dim() and not any(tensor.stride()):
            # New states may be expanded numbers: give the step a tensor that it can write to.
            with mode:
                return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        return fake(tensor)

    arguments = (
        [fake(tensor) for tensor in step.tensors.values()],
        [fake_state(tensor) for tensor in step.updates.values()],
        [fake(tensor) for tensor in step.flat_batch.values()],
        [fake(torch.zeros((), dtype=torch.float64)) for _ in step.scalars],
    )
    try:
        first = trace_graph(step, mode, arguments)
        held = tensors_by_name(first)
        for tensor in held.values():
            check_dense("constant", tensor, of="constant", todo="make it dense: .to_dense()")
        module = make_functional(first, len(arguments[0]) + len(arguments[1]))
    except CaptureError:
        raise
    except Exception as error:
        raise refusal(type(step.model).__name__, error, step.notes.sizes_by_value) from error
    inputs = step.inputs()
    states = [(entry.name, OutputKind.STATE) for entry in inputs if entry.kind.is_state]
    outputs = (*step.reported, *(states if step.update is not None else ()))
    # Outputs that side effects stored on modules are dropped. They have to be constants: the
    # program makes them in its first step and keeps them, the graph makes them in each step.
    result = next(node for node in module.graph.nodes if node.op == "output")
    flat = tree_leaves(result.args[0])
    removed = flat[len(outputs) :]
    if not all(map(_is_constant, removed)):
        raise next(change for change in step.side_effects if change.tensors).refusal()
    result.args = (tuple(flat[: len(outputs)]),)
    form: tuple[Any, ...] = ()
    if step.side_effects:
        form = _form(module, {node: at for at, node in enumerate(removed)})
    if step.attributes_before is not None:  # use the constants of the previous step
        numbers = {storage_key(one): at for at, one in enumerate(step.constants_before)}
        keys = {
            node: storage_key(getattr(module, node.target))
            for node in module.graph.nodes
            if node.op == "get_attr"
        }
        form = _form(module, {n: numbers[key] for n, key in keys.items() if key in numbers})
    module.graph.eliminate_dead_code()
    _check_states(module, step, inputs, outputs, held)
    return TracedStep(
        module=module,
        inputs=inputs,
        outputs=outputs,
        constants=tensors_by_name(module),
        update_source=step.update.source if step.update is not None else "",
        form=form,
    )


def _form(module: fx.GraphModule, numbered: Mapping[object, int]) -> tuple[Any, ...]:
    """Return the computation of a graph on its placeholders and some numbered nodes.

    Two graphs of equal form compute the same if their numbered nodes have equal values.
    """
    result = next(node for node in module.graph.nodes if node.op == "output")
    names: dict[object, Any] = {node: ("numbered", at) for node, at in numbered.items()}
    needed, waiting = set[object](), [result]
    while waiting:
        node = waiting.pop()
        if node not in needed and node not in names:
            needed.add(node)
            waiting += node.all_input_nodes
    lines: list[Any] = []
    for node in module.graph.nodes:
        if node in needed or (node.op == "placeholder" and node not in names):
            names[node] = len(lines)
            what: Any = str(node.target)
            if node.op == "get_attr":
                held = getattr(module, node.target).detach()
                what = (held.shape, held.dtype, repr(held.flatten().tolist()))
            given = fx.map_arg((node.args, node.kwargs), lambda used: names[used])
            lines.append((node.op, what, repr(given)))
    return tuple(lines)


def _is_constant(value: object) -> bool:
    """Whether a value depends on no placeholder and no random number."""
    seen, waiting = set[fx.Node](), [value]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        seeded = isinstance(node.target, OpOverload) and (
            torch.Tag.nondeterministic_seeded in node.target.tags
            or str(node.target).startswith("sbp.random_")
        )
        if node.op == "placeholder" or seeded:
            return False
        waiting += node.all_input_nodes
    return True


def _check_states(
    module: fx.GraphModule,
    step: TraceableStep,
    inputs: Collection[GraphInput],
    outputs: Collection[tuple[str, OutputKind]],
    held: Mapping[str, Tensor],
) -> None:
    """Refuse states that change while another tensor shares their memory.

    Raises:
        CaptureError: two states are different tensors on the same memory; or the program accesses
            a state in another way than through its module; or a later step would differentiate
            through an earlier one.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    placeholders = {entry.name: node for entry, node in zip(inputs, nodes, strict=True)}
    result = next(node for node in module.graph.nodes if node.op == "output")
    new = dict(zip((name for name, _ in outputs), tree_leaves(result.args[0]), strict=True))
    changed = {name for name in step.tensors if name in new and new[name] is not placeholders[name]}
    for name in step.differentiable:
        if set(placeholders[name].users) - {result}:
            raise CaptureError(
                f"the forward assigns a tensor that still has its graph to {name!r}: the "
                "next step would differentiate through this one",
                accepted="buffers that are assigned detached tensors",
                todo="assign x.detach(), or compute it under torch.no_grad()",
            )
    unread = {name for name in changed if not set(placeholders[name].users) - {result}}
    for first, second in shared_memory(step.tensors):
        if changed & {first, second} and not unread & {first, second}:
            raise CaptureError(
                f"{first!r} and {second!r} are different tensors on the same memory, and the step "
                "changes it",
                accepted="states with memory of their own; the same tensor under two names",
                todo=f"tie them, as in b.weight = a.weight without .data, or clone {second!r}",
            )
    own = {storage_key(step.tensors[name]): name for name in changed}
    for tensor in held.values():
        found = own.get(storage_key(tensor))
        if found is not None:
            raise CaptureError(
                f"the program holds the state {found!r} outside of its module: the "
                "graph would read its first value for ever, and pass no gradient to it",
                accepted="states that are read as attributes of their modules in each step",
                todo="in the loss, take it from the model that is given: model.parameters(), "
                "model.a.weight; in a module, do not keep it in a list or under a second name",
            )


def make_functional(first: fx.GraphModule, num_states: int) -> fx.GraphModule:
    """Return the graph without mutations, without copies of its inputs, and without `detach`.

    Args:
        first: The traced graph; it may be changed.
        num_states: Number of its first placeholders that may be written to.

    Raises:
        CaptureError: it writes to a tensor that is no argument and that outlives the step.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in first.graph.nodes:
        source = view_source(node)
        roots[node] = node if source is None else roots[source]
        target: Any = node.target
        if isinstance(target, OpOverload) and is_mutable(target):
            for written in written_arguments(target, node.args, node.kwargs, fx.Node):
                if roots[written].op == "get_attr":  # the next step would not see the write
                    note = node.meta.get("custom", {}).get("sbp", {})
                    raise written_outside(target, note.get("source", ""))
    second = rewrite_mutations(first) or retrace(first, num_states)
    for node in second.graph.nodes:
        if node.op != "call_function":
            continue
        copied = node.target is _aten.clone.default and not node.kwargs
        if (copied and node.args[0].op == "placeholder") or node.target is _aten.detach.default:
            node.replace_all_uses_with(node.args[0])
        if node.target is _aten.copy.default and _is_alike(*node.args[:2]):
            node.replace_all_uses_with(node.args[1])
    # The module is never called, so torch need not regenerate its code.
    second.graph.eliminate_dead_code()
    return second


def retrace(first: fx.GraphModule, num_states: int) -> fx.GraphModule:
    """Trace again with mutations replayed, on clones of the states."""
    placeholders = [node.meta["val"] for node in first.graph.nodes if node.op == "placeholder"]

    def run(*values: Tensor) -> Any:
        states = [value.clone() for value in values[:num_states]]
        interpreter = fx.Interpreter(first)
        return interpreter.run(*states, *values[num_states:], enable_io_processing=False)

    return functional_graph(run, placeholders)


def rewrite_mutations(first: fx.GraphModule) -> fx.GraphModule | None:
    """Rename after each write; return None, without changes, if that is not enough."""
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
    """Return, for each write, the written tensor and the op that makes a new tensor instead.

    Return None if another tensor sees a write.
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
    """Whether two nodes make tensors of equal shape and dtype."""
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
