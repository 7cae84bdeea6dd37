"""Trace a whole training step to one functional FX graph.

`make_fx` runs the user's Python (forward, loss, `autograd.grad`, the update) on fake tensors with
all states swapped in; then mutations are removed (`functional`). The graph computes what eager
computes, bit for bit, but for random numbers (see `randomness`). `capture.convert` turns the result
into our IR.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Tracing loads it, and so does any optimizer that is made: here, while collection is paused.
import torch._dynamo
from torch import Tensor, fx

from sbp_core.errors import CaptureError
from sbp_core.graph import GraphInput, OutputKind
from sbp_torch._torch_compat import OpOverload, fake_mode, storage_key, trace_graph
from sbp_torch.capture.diagnostics import refusal
from sbp_torch.capture.functional import make_functional, tensors_by_name
from sbp_torch.capture.rebound_states import shared_memory
from sbp_torch.capture.step import TrainingStep
from sbp_torch.capture.tensor_kinds import check_dense


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A functional FX graph and what its placeholders and outputs are, in order.

    `constants` are the tensors that the program made outside of what is traced, by the name of the
    graph's attribute. `update_source` is where the optimizer is written, as `file:line`. `form` is
    what the graph computes, to be compared; only of a step that leaves something on its modules, or
    that is traced with what an earlier one has left there.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[tuple[str, OutputKind], ...]
    constants: Mapping[str, Tensor]
    update_source: str = ""
    form: tuple[Any, ...] = ()


def trace_step(step: TrainingStep) -> TracedStep:
    """Trace a step as one FX graph.

    Raises:
        CaptureError: the step cannot be traced; says which line of the user's code stopped it, and
            what to change.
    """
    mode = fake_mode()

    def fake(tensor: Tensor) -> Tensor:
        if tensor.is_meta:  # of a deferred model, which has no values yet
            with mode:
                return torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
        return mode.from_tensor(tensor.detach(), static_shapes=True)

    def fake_state(tensor: Tensor) -> Tensor:
        if tensor.dim() and not any(tensor.stride()):
            # One number, expanded, as states begin: the step sees a tensor that it can write to.
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
    removed = _remove_side_effect_outputs(module, step, len(outputs))
    form: tuple[Any, ...] = ()
    if step.side_effects:
        form = _form(module, {node: at for at, node in enumerate(removed)})
    if step.attributes_before is not None:
        form = _form(module, _constants_among(module, step.constants_before))
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


def _remove_side_effect_outputs(
    module: fx.GraphModule, step: TrainingStep, num_outputs: int
) -> list[object]:
    """Drop the outputs that side effects stored on modules, and return their nodes.

    Those that follow from nothing that changes are constants: the program makes them in its first
    step and keeps them, the graph makes them in each.

    Raises:
        CaptureError: one follows from an input, a state or a random number.
    """
    result = next(node for node in module.graph.nodes if node.op == "output")
    flat = _leaves(result.args[0])
    removed = flat[num_outputs:]
    if not all(map(_is_constant, removed)):
        raise next(change for change in step.side_effects if change.tensors).refusal()
    result.args = (tuple(flat[:num_outputs]),)
    return removed


def _constants_among(module: fx.GraphModule, tensors: Sequence[Tensor]) -> dict[object, int]:
    """Return the nodes that stand for some constants, and the number of the constant."""
    numbers = {storage_key(tensor): at for at, tensor in enumerate(tensors)}
    found = {
        node: numbers.get(storage_key(getattr(module, node.target)))
        for node in module.graph.nodes
        if node.op == "get_attr"
    }
    return {node: at for node, at in found.items() if at is not None}


def _form(module: fx.GraphModule, numbered: Mapping[object, int]) -> tuple[Any, ...]:
    """Return what a graph computes of its placeholders and of some of its nodes, which it numbers.

    Two graphs of one form compute the same if those nodes hold the same.
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
    """Whether a value follows from no placeholder and no random number."""
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
    step: TrainingStep,
    inputs: Collection[GraphInput],
    outputs: Collection[tuple[str, OutputKind]],
    held: Mapping[str, Tensor],
) -> None:
    """Refuse states that change while something else looks at their memory.

    Raises:
        CaptureError: two states are different tensors on the same memory; or the program reaches a
            state otherwise than through its module; or a later step would differentiate through
            an earlier one.
    """
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    placeholders = {entry.name: node for entry, node in zip(inputs, nodes, strict=True)}
    result = next(node for node in module.graph.nodes if node.op == "output")
    new = dict(zip((name for name, _ in outputs), _leaves(result.args[0]), strict=True))
    changed = {name for name in step.tensors if name in new and new[name] is not placeholders[name]}
    for name in step.differentiable:
        if set(placeholders[name].users) - {result}:
            raise CaptureError(
                f"the forward puts a tensor in the place of {name!r} that still has its graph: the "
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
                f"the program holds the state {found!r} otherwise than through its module: the "
                "graph would read its first value for ever, and pass no gradient to it",
                accepted="states that are read as attributes of their modules in each step",
                todo="in the loss, take it from the model that is given: model.parameters(), "
                "model.a.weight; in a module, do not keep it in a list or under a second name",
            )


def _leaves(nested: object) -> list[object]:
    if isinstance(nested, tuple | list):
        return [leaf for part in nested for leaf in _leaves(part)]
    return [nested]
