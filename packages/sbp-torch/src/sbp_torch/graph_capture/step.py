"""`TraceableStep`: the user's training step as a function of its states, for `trace` to run.

(parameters and buffers, states of the update, batch, scalars)
    -> (losses and metrics, new parameters and buffers, new states of the update)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from sbp_core.errors import CaptureError
from sbp_core.graph import GraphInput, InputKind, OutputKind, Phase
from sbp_torch._torch_compat import (
    compiling,
    gradient_hooks,
    own_kernels_only,
    reparametrized,
    storage_key,
    without_modes,
)
from sbp_torch._torch_patches import (
    distributions_unchecked,
    grad_scaling_refused,
    transformers_of_any_mask,
)
from sbp_torch.graph_capture.batch import flatten_batch, rebuild_batch
from sbp_torch.graph_capture.diagnostics import check_dense, scaled_loss
from sbp_torch.graph_capture.loss import Loss, split_losses
from sbp_torch.graph_capture.numbers import NO_NUMBERS, NumberPlace, placed
from sbp_torch.graph_capture.provenance import Notes
from sbp_torch.graph_capture.randomness import Draws
from sbp_torch.graph_capture.side_effects import (
    AttributeSnapshot,
    Change,
    Generators,
    replaced_states,
)
from sbp_torch.graph_capture.sparse_lookups import SparseGradient, SparseLookups
from sbp_torch.graph_capture.update import Update

#: Scalar inputs of counter-based random ops.
SEED, DRAW = "seed", "draw"

#: The name that passes give to the tied step counters of all parameters.
_STEP_COUNTER = "step_counter"

#: The dtypes of `torch.autocast`.
_AUTOCAST = ("bfloat16", "float16")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers, and tensors that modules hold unregistered, by name.

    Tied tensors are returned once. A tensor in a plain attribute of a module counts as a buffer.

    Raises:
        CaptureError: a tensor has no shape yet.
    """
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in found.items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise CaptureError(
                f"{name!r} has no shape yet: its module waits for its first input",
                accepted="modules that know their sizes",
                todo="give the sizes (nn.Linear instead of nn.LazyLinear), or call the model once",
            )
    known = {id(tensor) for tensor in found.values()}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) not in known:
                found[f"{path}.{key}" if path else key] = value
                known.add(id(value))
    return found


@contextmanager
def trainable(parameters: Collection[Tensor]) -> Iterator[None]:
    """Make parameters trainable inside the block, even frozen ones."""
    frozen = [one for one in parameters if not one.requires_grad]
    try:
        for one in frozen:
            one.requires_grad_(True)
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)


class TraceableStep:
    """Forward, loss and, with an update, backward and update.

    Args:
        model: The one-device program.
        loss: See `capture`.
        batch: An example batch.
        update: The update; None for forward and loss only.
        autocast: dtype name for `torch.autocast` around the forward phase; empty for none.
        per_shard_random: See `Draws`.
        as_compiling: Whether `is_compiling()` returns True while the forward runs.
        previous: A traced step whose forward had side effects: this forward begins with the
            attributes after that one; None to begin with the present attributes.
        numbers: Places of numbers that the forward reads, by the names of their scalar inputs.
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
        previous: TraceableStep | None = None,
        numbers: Mapping[str, NumberPlace] = NO_NUMBERS,
    ) -> None:
        self.model, self.loss, self.batch, self.update = model, loss, batch, update
        self.autocast, self.as_compiling = autocast, as_compiling
        self.attributes_before = previous.attributes_after if previous is not None else None
        self.constants_before = previous.side_effect_constants if previous is not None else []
        self.tensors = model_tensors(model)
        self.moving = [
            name
            for name, tensor in self.tensors.items()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
        self.updates = update.values() if update is not None else {}
        self.flat_batch = flatten_batch(batch)
        self.numbers = numbers
        self.scalars = [*(update.scalars if update is not None else ()), *numbers]
        self.notes = Notes(Draws(per_shard=per_shard_random))
        self.sparse = SparseLookups()
        #: Names and kinds of the outputs before the states, known after the first call.
        self.reported: list[tuple[str, OutputKind]] = []
        #: The side effects of the forward, known after the first call; the attributes of all
        #: modules after it; and the real tensors that replace tensors of the trace in these.
        self.side_effects: list[Change] = []
        self.attributes_after: AttributeSnapshot | None = None
        self.side_effect_constants: list[Tensor] = []
        #: States that the forward replaced by a tensor that is still attached to autograd.
        self.differentiable: list[str] = []
        self._check()

    def _check(self) -> None:
        """Check that options are known, and that the tensors of the model can be trained.

        Raises:
            CaptureError: an option is unknown, or a tensor is not dense, has hooks or a used name.
        """
        for name, tensor in self.tensors.items():
            check_dense(name, tensor, of="model", todo="keep it dense: .to_dense()")
            if tensor.is_inference() and name in self.moving:
                raise CaptureError(
                    f"{name!r} was made under torch.inference_mode(), and cannot be differentiated",
                    accepted="parameters that were made outside of it",
                    todo="make the model outside of torch.inference_mode()",
                )
        reserved = (*self.scalars, SEED, DRAW, _STEP_COUNTER)
        taken = {*self.tensors, *self.updates, *reserved}
        for name in self.tensors:
            if name in reserved:
                raise CaptureError(
                    f"{name!r} is the name of a parameter or buffer, and of an input of every "
                    "captured step",
                    accepted=f"other names than {', '.join(reserved)}",
                    todo=f"rename it, or put it into a module of its own ('scale.{name}')",
                )
        for name in self.flat_batch:
            if name in taken:
                raise CaptureError(
                    f"{name!r} is the name of a batch tensor and of a state or input of the step",
                    accepted="other names",
                    todo="rename the key in the batch",
                )
        if self.autocast and self.autocast not in _AUTOCAST:
            raise CaptureError(
                f"autocast={self.autocast!r}", accepted=f"{', '.join(_AUTOCAST)}, or nothing"
            )
        moving = self.moving if self.update is not None else ()
        hooked = [name for name in moving if gradient_hooks(self.tensors[name])[1]]
        if hooked:
            raise CaptureError(
                f"{hooked[0]!r} has a hook by register_post_accumulate_grad_hook, which no "
                "captured step runs",
                accepted="hooks on gradients: parameter.register_hook(...), hooks of modules",
                todo="change the gradient by register_hook, or do in the optimizer what it does",
            )

    def inputs(self) -> tuple[GraphInput, ...]:
        """Describe the arguments of `__call__`, in order."""
        kinds = {
            name: InputKind.PARAMETER if isinstance(tensor, nn.Parameter) else InputKind.BUFFER
            for name, tensor in self.tensors.items()
        }
        return (
            *(GraphInput(name=name, kind=kind) for name, kind in kinds.items()),
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
    ) -> tuple[list[Tensor], ...]:
        """Return (losses and metrics, new parameters and buffers, new states of the update, ...).

        The last list holds the tensors that side effects of the forward stored on its modules.
        """
        held = dict(zip(self.tensors, tensors, strict=True))
        own = dict(zip(self.updates, states, strict=True))
        rates = dict(zip(self.scalars, scalars, strict=True))
        with self.notes:
            with torch.enable_grad():
                leaves: dict[str, Tensor] = {}  # the loss is differentiated by these
                for name in self.moving:
                    leaves[name] = leaf = held[name].detach().requires_grad_()
                    for hook in gradient_hooks(self.tensors[name])[0]:
                        leaf.register_hook(hook)  # type: ignore[no-untyped-call] # torch's
                numbers = {name: rates[name].item() for name in self.numbers}
                loss, metrics, replaced = self._forward(held | leaves, batch, numbers)
                held |= replaced
                # The update must not change a metric, so copy a metric that is a view of a state.
                memory = {storage_key(tensor) for tensor in held.values()}
                metrics = {
                    name: value.detach().clone() if storage_key(value) in memory else value
                    for name, value in metrics.items()
                }
                extras = [tensor.detach() for tensor in self._side_effect_tensors()]
                if self.update is not None:
                    scaled = self.update.scale(loss, own)
                    if not scaled.requires_grad:
                        raise CaptureError(
                            "the loss depends on no parameter that is trained",
                            accepted="a loss made of parameters with requires_grad",
                            todo="do not detach the loss, and leave torch.no_grad() out of it",
                        )
                    lookups = self.sparse.of(leaves, scaled)
                    with self.notes.during(Phase.BACKWARD):
                        sparse = {name: SparseGradient.of(calls) for name, calls in lookups.items()}
                        found = torch.autograd.grad(
                            scaled, list(leaves.values()), allow_unused=True
                        )
                    grads = dict(zip(leaves, found, strict=True))
            if self.update is not None:
                with torch.no_grad(), self.notes.during(Phase.OPTIMIZER):
                    made = self.update(held, grads, own, rates, sparse)
                for name in metrics.keys() & made.keys():
                    raise CaptureError(
                        f"the loss returns a metric {name!r}, which is what the update calls its "
                        "own",
                        accepted=f"other names than {', '.join(made)}",
                        todo="rename the metric in the loss",
                    )
                metrics |= made
        self.reported = [("loss", OutputKind.LOSS)]
        self.reported += [(name, OutputKind.METRIC) for name in metrics]
        report = [loss.detach(), *(value.detach() for value in metrics.values())]
        if self.update is None:
            return report, [], [], extras
        return report, list(held.values()), list(own.values()), extras

    def _side_effect_tensors(self) -> list[Tensor]:
        found = [tensor for change in self.side_effects for tensor in change.tensors]
        return list({id(tensor): tensor for tensor in found}.values())

    def _forward(
        self, tensors: Mapping[str, Tensor], batch: list[Tensor], numbers: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the loss, metrics, and the new tensors that the forward assigned to states."""
        parts = dict(zip(self.flat_batch, batch, strict=True))
        given = rebuild_batch(self.batch, parts)
        device = next(iter(tensors.values())).device.type if tensors else "cpu"
        cast = (
            torch.autocast(device, dtype=getattr(torch, self.autocast))
            if self.autocast
            else nullcontext()
        )
        hint = compiling() if self.as_compiling else nullcontext()
        storages = {name: storage_key(tensor) for name, tensor in tensors.items()}
        now = dict(tensors)
        before, generators = AttributeSnapshot(self.model), Generators()
        try:
            if self.attributes_before is not None:
                self.attributes_before.restore()
            with (
                self.notes.follow(self.model),
                reparametrized(self.model, now),
                distributions_unchecked(),
                grad_scaling_refused(scaled_loss),
                transformers_of_any_mask(),
                own_kernels_only(),
                self.sparse.followed(),
                cast,
                hint,
                placed(self.numbers, numbers),
            ):
                for name, tensor in now.items():  # attributes such as p.weight_decay
                    for key, value in vars(self.tensors[name]).items():
                        vars(tensor).setdefault(key, value)
                loss, metrics = split_losses(self.loss(self.model, given))
            generators.check()
            if self.update is not None:
                self._check_trained(tensors)
            stand_ins = {id(tensor): self.tensors[name] for name, tensor in tensors.items()}
            self.side_effects = (self.attributes_before or before).changes(stand_ins)
            if self.side_effects:
                self.attributes_after = AttributeSnapshot(self.model)
                with without_modes():
                    self.side_effect_constants = self.attributes_after.with_real_tensors(
                        self._side_effect_tensors()
                    )
        finally:
            before.restore()
            generators.restore()
        for change in self.side_effects:
            if change.registered or (change.is_mode and self.update is not None):
                raise change.refusal()
        replaced = replaced_states(self.tensors, tensors, now, storages)
        self.differentiable = [name for name, tensor in replaced.items() if tensor.requires_grad]
        return loss, metrics, {name: tensor.detach() for name, tensor in replaced.items()}

    def _check_trained(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the loss has neither frozen nor unfrozen a parameter.

        Raises:
            CaptureError: it has; gradients are computed for the parameters trained before it.
        """
        trained = set(self.moving)
        for name, tensor in tensors.items():
            was, now = name in trained, tensor.requires_grad and tensor.is_leaf
            if was != now and isinstance(self.tensors[name], nn.Parameter):
                raise CaptureError(
                    f"the loss {'unfreezes' if now else 'freezes'} {name!r}: its requires_grad is "
                    f"{now} after the loss, and was {not now} before",
                    accepted="parameters that are frozen and unfrozen between steps",
                    todo=f"call requires_grad_({now}) in the loop, before the step; an optimizer "
                    "changes its own parameters only, so that a loss need not freeze other "
                    "parameters",
                )
