"""The training step as a function of its states: what the first trace runs.

(parameters and buffers, states of the update, batch, scalars)
    -> (losses and metrics, new parameters and buffers, new states of the update)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core._torch_compat import compiling, reparametrized
from sbp_core.capture.batch import flatten_batch, rebuild_batch
from sbp_core.capture.notes import Notes
from sbp_core.capture.randomness import Draws
from sbp_core.capture.update import Update
from sbp_core.errors import CaptureError
from sbp_core.graph.ir import GraphInput, InputKind, OutputKind, Phase

#: What users write: the loss of a batch, or the loss and metrics.
Loss = Callable[[nn.Module, Any], Any]

#: Scalar inputs that random ops count with.
SEED, DRAW = "seed", "draw"

_ACCEPTED = (
    "one floating number (a 0-d tensor); a pair of it and a mapping of metrics; or a mapping with "
    "the key 'loss'"
)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers, and tensors that modules hold unregistered, by name.

    Tied tensors come once. A constant that a module keeps as a plain attribute is a buffer, too.
    """
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {id(tensor) for tensor in found.values()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in known:
                found[f"{path}.{key}" if path else key] = value
                known.add(id(value))
    return found


class TrainingStep:
    """Forward, loss and, with an update, backward and update.

    Args:
        model: The one-device program.
        loss: See `capture`.
        batch: An example.
        update: What is done with gradients; None for forward and loss only.
        autocast: dtype name for `torch.autocast` around the forward phase; empty for none.
        per_shard_random: See `Draws`.
        as_compiling: Tell the model that it is being compiled, while its forward runs.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Any,
        update: Update | None,
        *,
        autocast: str = "",
        per_shard_random: bool = False,
        as_compiling: bool = False,
    ) -> None:
        self.model, self.loss, self.batch, self.update = model, loss, batch, update
        self.autocast, self.as_compiling = autocast, as_compiling
        self.tensors = model_tensors(model)
        self.moving = [
            name
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
        self.updates = update.values() if update is not None else {}
        self.flat_batch = flatten_batch(batch)
        self.scalars = list(update.scalars) if update is not None else []
        self.notes = Notes(Draws(per_shard=per_shard_random))
        #: Names and kinds of the outputs before the states, known after the first call.
        self.reported: list[tuple[str, OutputKind]] = []
        self._check_names()

    def _check_names(self) -> None:
        taken = {*self.tensors, *self.updates, *self.scalars, SEED, DRAW}
        for name in self.flat_batch:
            if name in taken:
                raise CaptureError(
                    f"{name!r} is the name of a batch tensor and of a state of the model",
                    accepted="other names",
                    todo="rename the key in the batch",
                )

    def inputs(self) -> tuple[GraphInput, ...]:
        """Describe the arguments of `__call__`, in order."""
        return (
            *(GraphInput(name=name, kind=_kind(tensor)) for name, tensor in self.tensors.items()),
            *(self.update.inputs() if self.update is not None else ()),
            *(GraphInput(name=name, kind=InputKind.BATCH) for name in self.flat_batch),
            *(GraphInput(name=name, kind=InputKind.SCALAR) for name in self.scalars),
        )

    def __call__(
        self,
        tensors: list[Tensor],
        states: list[Tensor],
        batch: list[Tensor],
        scalars: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return (losses and metrics, new parameters and buffers, new states of the update)."""
        held = dict(zip(self.tensors, tensors, strict=True))
        own = dict(zip(self.updates, states, strict=True))
        rates = dict(zip(self.scalars, scalars, strict=True))
        with self.notes:
            with torch.enable_grad():
                leaves = {name: held[name].detach().requires_grad_() for name in self.moving}
                loss, metrics = self._forward(held | leaves, batch)
                if self.update is None:
                    return self._report(loss, metrics), [], []
                grads = self._backward(self.update.scale(loss, own), leaves)
            with torch.no_grad(), self.notes.during(Phase.OPTIMIZER):
                metrics = {**metrics, **(self.update(held, grads, own, rates) or {})}
        return self._report(loss, metrics), list(held.values()), list(own.values())

    def _forward(
        self, tensors: Mapping[str, Tensor], batch: list[Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        parts = dict(zip(self.flat_batch, batch, strict=True))
        given = rebuild_batch(self.batch, parts)
        device = next(iter(tensors.values())).device.type if tensors else "cpu"
        cast = (
            torch.autocast(device, dtype=getattr(torch, self.autocast))
            if self.autocast
            else nullcontext()
        )
        hint = compiling() if self.as_compiling else nullcontext()
        with self.notes.follow(self.model), reparametrized(self.model, tensors), cast, hint:
            return split_losses(self.loss(self.model, given))

    def _backward(self, loss: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        if not loss.requires_grad:
            raise CaptureError(
                "the loss depends on no parameter that is trained",
                accepted="a loss made of parameters with requires_grad",
                todo="do not detach the loss, and leave torch.no_grad() out of it",
            )
        with self.notes.during(Phase.BACKWARD):
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, grads, strict=True))

    def _report(self, loss: Tensor, metrics: Mapping[str, Tensor]) -> list[Tensor]:
        self.reported = [
            ("loss", OutputKind.LOSS),
            *((name, OutputKind.METRIC) for name in metrics),
        ]
        return [loss.detach(), *(value.detach() for value in metrics.values())]


def split_losses(made: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the loss and the metrics in what a loss function returned.

    Of a mapping without a pair around it (such as a model's own output) the other 0-d tensors are
    the metrics.

    Raises:
        CaptureError: it holds no loss, or a metric that is no tensor.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Mapping):
        made, metrics = made
    elif isinstance(made, Mapping) and "loss" in made:
        metrics = {
            name: value
            for name, value in made.items()
            if name != "loss" and isinstance(value, Tensor) and value.dim() == 0
        }
        made = made["loss"]
    if not isinstance(made, Tensor) or made.dim() != 0 or not made.dtype.is_floating_point:
        what = (
            f"{made.dtype} of shape {tuple(made.shape)}"
            if isinstance(made, Tensor)
            else type(made).__name__
        )
        raise CaptureError(f"the loss is {what}", accepted=_ACCEPTED)
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or name == "loss":
            raise CaptureError(
                f"the metric {name!r} is {type(value).__name__}",
                accepted="tensors, by other names than 'loss'",
            )
    return made, metrics


def _kind(tensor: Tensor) -> InputKind:
    return InputKind.PARAMETER if isinstance(tensor, nn.Parameter) else InputKind.BUFFER
