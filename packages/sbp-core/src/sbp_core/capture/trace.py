"""Trace a whole training step to one functional FX graph.

`make_fx` runs the user's Python (forward, loss, `autograd.grad`, the update) on fake tensors with
all states swapped in; then mutations are removed (`functional`). The graph computes what eager
computes, bit for bit, but for random numbers (see `randomness`). `capture.convert` turns the result
into our IR.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from sbp_core._torch_compat import fake_mode, trace_graph
from sbp_core.capture.functional import make_functional, tensors_by_name
from sbp_core.capture.refusal import refusal
from sbp_core.capture.step import TrainingStep
from sbp_core.errors import CaptureError
from sbp_core.graph.ir import GraphInput, OutputKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A functional FX graph and what its placeholders and outputs are, in order.

    `constants` are the tensors that the program made outside of what is traced, by the name of the
    graph's attribute.
    """

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[tuple[str, OutputKind], ...]
    constants: Mapping[str, Tensor]


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

    arguments = (
        [fake(tensor) for tensor in step.tensors.values()],
        [fake(tensor) for tensor in step.updates.values()],
        [fake(tensor) for tensor in step.flat_batch.values()],
        [fake(torch.zeros((), dtype=torch.float64)) for _ in step.scalars],
    )
    with _attributes_kept(step.model) as left:
        try:
            first = trace_graph(step, mode, arguments)
        except CaptureError:
            raise
        except Exception as error:
            raise refusal(type(step.model).__name__, error) from error
    _check_side_effects(left)
    inputs = step.inputs()
    states = [(entry.name, OutputKind.STATE) for entry in inputs if entry.kind.is_state]
    module = make_functional(first, len(arguments[0]) + len(arguments[1]))
    return TracedStep(
        module=module,
        inputs=inputs,
        outputs=(*step.reported, *(states if step.update is not None else ())),
        constants=tensors_by_name(module),
    )


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Set tensors that modules hold as plain attributes back to what they were.

    Yields:
        A list that holds, at the end, the module path and name of each attribute set back.
    """
    before = _attributes(model)
    left: list[tuple[str, str]] = []
    try:
        yield left
    finally:
        for (path, key), value in _attributes(model).items():
            if before.get((path, key)) is not value:
                left.append((path, key))
                delattr(model.get_submodule(path), key)
        for (path, key), value in before.items():
            setattr(model.get_submodule(path), key, value)


def _attributes(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    return {
        (path, key): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _check_side_effects(left: Sequence[tuple[str, str]]) -> None:
    """Refuse a forward that leaves tensors on its modules: nothing would set them later."""
    for path, key in left:
        raise CaptureError(
            f"the forward of module {path or '(root)'!r} sets {key!r}, which outlives the step",
            accepted="tensors that outlive a step are registered buffers, changed in place",
            todo=f"return {key!r} as a metric, or register_buffer({key!r}, ...) and copy_ into it",
        )
