"""`Update`: the part of a captured step after the gradients, as a function that can be traced.

It unscales and clips gradients, runs the optimizer (`traced_optimizer`), and averages parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, MutableMapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_core.graph import GraphInput, InputKind
from sbp_torch.graph_capture.diagnostics import definition
from sbp_torch.graph_capture.differential_validation import check_against_eager
from sbp_torch.graph_capture.functional_updates import add_all, total_norm
from sbp_torch.graph_capture.optimizer_clones import check_capturable
from sbp_torch.graph_capture.sparse_lookups import SparseGradient
from sbp_torch.graph_capture.traced_optimizer import (
    ParameterGroup,
    TracedOptimizer,
    scalar_names,
    setting_of,
)
from sbp_torch.optim.combined import members
from sbp_torch.update_options import SETTINGS, LossScaling, UpdateOptions

__all__ = ["LossScaling", "Update", "UpdateOptions", "current_scalars"]

#: States that belong to no parameter.
SCALE, GROWTH, AVERAGED = "loss_scaler.scale", "loss_scaler.growth_tracker", "ema.count"

#: Added to the norm before it divides, as `torch.nn.utils.clip_grad_norm_` does.
_EPS = 1e-6

#: The key of the average among a parameter's states, and the scalar input of its decay.
AVERAGE, DECAY = "ema", "ema_decay"


class Update:
    """The update of parameters from gradients, as a function of its states.

    Args:
        model: The model whose parameters are updated.
        optimizer: An optimizer of `model.parameters()`; it may have stepped before.
        options: The other parts of the update.
        device: Kind of device that the step will run on; None if nothing will run.

    Raises:
        CaptureError: the optimizer cannot be captured, or has parameters that the model does not
            have; or the options need a setting that the optimizer does not have.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        options: UpdateOptions = UpdateOptions(),  # noqa: B008 - frozen
        device: str | None = None,
    ) -> None:
        self.options = options
        self._parameters = dict(model.named_parameters())
        self._optimizers = _optimizers(self._parameters, optimizer, options, device)
        self._groups = [group for one in self._optimizers for group in one.groups]
        nested = {name: of for group in self._groups for name, of in group.states.items()}
        self._averaged: list[str] = []
        if options.ema_decay is not None:
            self._averaged = [name for name, p in self._parameters.items() if p.requires_grad]
        for name in self._averaged:
            nested[name] = {**nested.get(name, {}), AVERAGE: self._parameters[name].detach()}
        #: States of parameters by name, each with its parameter.
        self._own = {
            f"{of}.{key}": (of, value) for of, own in nested.items() for key, value in own.items()
        }
        for name in self.values().keys() & {*self._parameters, *dict(model.named_buffers())}:
            raise CaptureError(
                f"{name!r} is the name of a parameter or buffer and of a state of the update",
                accepted="other names",
                todo="rename the module",
            )
        _check_options(self._groups, optimizer, options)
        #: `file:line` of the optimizer's definition.
        self.source = definition(type(optimizer))
        #: Names of the scalar inputs: the learning rate of each parameter group, and others.
        self.scalars = list(current_scalars(optimizer, options))

    def inputs(self) -> tuple[GraphInput, ...]:
        """Describe the states of the update, in the order of `values`."""
        kind = InputKind.OPTIMIZER_STATE
        own = (GraphInput(name=name, kind=kind, of=of) for name, (of, _) in self._own.items())
        return (*own, *(GraphInput(name=name, kind=kind) for name in self._shared_states()))

    def values(self) -> dict[str, Tensor]:
        """Return the present states, by the names of their inputs."""
        return {name: value for name, (_, value) in self._own.items()} | self._shared_states()

    def copies(self) -> set[str]:
        """Return the states that begin as copies of their parameter, possibly in another dtype."""
        own = {
            f"{name}.{key}"
            for group in self._groups
            for name, keys in group.copies.items()
            for key in keys
        }
        return own | {f"{name}.{AVERAGE}" for name in self._averaged}

    def _shared_states(self) -> dict[str, Tensor]:
        """Return the states that belong to no parameter."""
        found: dict[str, Tensor] = {}
        if self.options.loss_scaling is not None:
            found[SCALE] = torch.tensor(self.options.loss_scaling.init_scale, dtype=torch.float32)
            found[GROWTH] = torch.zeros((), dtype=torch.int32)
        if self._averaged:
            found[AVERAGED] = torch.zeros((), dtype=torch.float32)
        device = next(iter(self._parameters.values())).device
        if device.type == "meta":  # a deferred model, for which these states still have values
            return found
        return {name: value.to(device) for name, value in found.items()}

    def scale(self, loss: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        """Return the number to differentiate: the loss, scaled if loss scaling is on."""
        return loss if self.options.loss_scaling is None else loss * states[SCALE]

    def __call__(
        self,
        parameters: MutableMapping[str, Tensor],
        grads: Mapping[str, Tensor | None],
        states: MutableMapping[str, Tensor],
        scalars: Mapping[str, Tensor],
        sparse: Mapping[str, SparseGradient] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Update parameters and states, in place or by new tensors in the mappings.

        Args:
            parameters: Every parameter by name; parameters with gradients are changed.
            grads: The gradient of each trained parameter; None if the loss does not use it.
            states: Every state of `inputs` by name; changed.
            scalars: Every scalar of `scalars` by name: 0-d float64 tensors.
            sparse: For each parameter whose gradient is sparse in PyTorch, what the dense one
                lacks.

        Returns:
            Metrics of the update by name, 0-d tensors: `grad_norm` before clipping; `skipped`,
            1 after an overflow; `loss_scale` of the next step.
        """
        # Only of parameters that the optimizer trains: others get no update, and do not count.
        own = {name for group in self._groups for name in group.parameters}
        found = {name: one for name, one in grads.items() if one is not None and name in own}
        metrics: dict[str, Tensor] = {}
        overflow = None
        if self.options.loss_scaling is not None:
            # In the order of PyTorch's loop: unscale, look for overflows, clip, step, average. The
            # norm for clipping and reporting is that of unscaled gradients.
            inverse = states[SCALE].double().reciprocal().float()
            found = {name: (value * inverse).to(value.dtype) for name, value in found.items()}
            num_finite = add_all((value.abs() < math.inf).sum() for value in found.values())
            overflow = num_finite != sum(value.numel() for value in found.values())
            metrics["skipped"] = overflow.float()
        found = self._clip(found, metrics)
        updated, before = list[str](), dict[str, Tensor]()
        if overflow is not None:
            updated = sorted({name for one in self._optimizers for name in one.updated_names()})
            before = {name: parameters[name].clone() for name in updated}
            before |= {name: value.clone() for name, value in states.items()}
        for one in self._optimizers:
            one.step(parameters, found, states, scalars, sparse)
        if self._averaged:
            self._average(parameters, states, scalars[DECAY])
        if overflow is not None:
            # The step is always computed, because a graph has no branches. After an overflow, the
            # old values are selected.
            _undo(parameters, updated, before, overflow)
            # An overflow changes only the states of the scaler.
            _undo(states, states.keys() - {SCALE, GROWTH}, before, overflow)
            self._rescale(states, overflow)
            metrics["loss_scale"] = states[SCALE]
        return metrics

    def _clip(self, grads: dict[str, Tensor], metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        options = self.options
        if options.clip_norm is not None or options.report_norm:
            metrics["grad_norm"] = norm = total_norm(grads.values(), options.norm_type)
            if options.clip_norm is not None:  # as `clip_grad_norm_` does
                factor = (options.clip_norm / (norm + _EPS)).clamp(max=1.0)
                grads = {name: (value * factor).to(value.dtype) for name, value in grads.items()}
        if (bound := options.clip_value) is not None:  # as `clip_grad_value_` does
            grads = {name: value.clamp(min=-bound, max=bound) for name, value in grads.items()}
        return grads

    def _average(
        self, parameters: Mapping[str, Tensor], states: MutableMapping[str, Tensor], decay: Tensor
    ) -> None:
        """Move each average towards its parameter; the first average is the parameter.

        Source: torch 2.13, torch/optim/swa_utils.py, `AveragedModel.update_parameters`.
        """
        states[AVERAGED] = count = states[AVERAGED] + 1
        # The weight of the parameter is 1 for the first average, then 1 - decay; 0 ** 0 is 1.
        # Without a scaler, count and weight are host numbers. With a scaler, skipped steps do not
        # count, so both depend on a tensor.
        if self.options.loss_scaling is None:
            first = 0.0 ** (count.item() - 1.0)
        else:
            first = (count == 1).double()
        share = first + (1.0 - first) * (1.0 - decay.item())
        for name in self._averaged:
            key = f"{name}.{AVERAGE}"
            if isinstance(share, Tensor):
                share = share.to(parameters[name].dtype)
            states[key] = states[key].lerp(parameters[name], share)

    def _rescale(self, states: MutableMapping[str, Tensor], overflow: Tensor) -> None:
        """Update the scale as `GradScaler.update` does."""
        scaling = self.options.loss_scaling
        assert scaling is not None, "there is a scale"
        scale, good_steps = states[SCALE], states[GROWTH] + 1
        grows = good_steps == scaling.growth_interval
        grown = scale * scaling.growth_factor
        # As in PyTorch, a scale that would become infinite does not change.
        grown = torch.where(grown < float("inf"), grown, scale)
        without_overflow = torch.where(grows, grown, scale)
        states[SCALE] = torch.where(overflow, scale * scaling.backoff_factor, without_overflow)
        reset = torch.zeros_like(good_steps)
        states[GROWTH] = torch.where(overflow.logical_or(grows), reset, good_steps)


def current_scalars(optimizer: torch.optim.Optimizer, options: UpdateOptions) -> dict[str, float]:
    """Return the present values of the scalar inputs of an update, by name.

    It only reads the parameter groups, so it may be called before every step.
    """
    found: dict[str, float] = {}
    groups = [group for one in members(optimizer) for group in one.param_groups]
    for number, settings in enumerate(groups):
        suffix = "" if len(groups) == 1 else f".{number}"
        for setting, name in scalar_names(settings, suffix, options).items():
            found[name] = setting_of(settings, setting)
    if options.ema_decay is not None:
        found[DECAY] = options.ema_decay
    return found


def _undo(
    values: MutableMapping[str, Tensor],
    names: Iterable[str],
    before: Mapping[str, Tensor],
    overflow: Tensor,
) -> None:
    for name in sorted(names):
        values[name] = torch.where(overflow, before[name], values[name])


def _optimizers(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    options: UpdateOptions,
    device: str | None,
) -> list[TracedOptimizer]:
    """Return the optimizers that an optimizer combines, each as a function of its states."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    count, number = len(optimizer.param_groups), 0
    found: list[TracedOptimizer] = []
    # Check all optimizers first, including the one that combines others, because the comparison
    # with eager steps below takes much longer.
    for member in (optimizer, *members(optimizer)):
        check_capturable(member)
    for member in members(optimizer):
        groups: list[ParameterGroup] = []
        for index, settings in enumerate(member.param_groups):
            for parameter in settings["params"]:
                if id(parameter) not in names:
                    every = (p for group in optimizer.param_groups for p in group["params"])
                    todo = (
                        "make it a parameter of the model before the optimizer is made: "
                        "model.log_alpha = nn.Parameter(...), which the loss reads there"
                    )
                    if names.keys().isdisjoint(map(id, every)):
                        todo = "make the optimizer over the parameters of the model that is passed "
                        todo += "with it"
                    raise CaptureError(
                        "the optimizer holds a parameter that the model does not have, of shape "
                        f"{tuple(parameter.shape)}, in its group {number}",
                        accepted="an optimizer over model.parameters()",
                        todo=todo,
                    )
            own = {names[id(parameter)]: parameter for parameter in settings["params"]}
            suffix = "" if count == 1 else f".{number}"
            groups.append(ParameterGroup(member, index, own, suffix, options, device))
            number += 1
        check_against_eager(member)
        found.append(TracedOptimizer(member, groups))
    return found


def _check_options(
    groups: Iterable[ParameterGroup], optimizer: torch.optim.Optimizer, options: UpdateOptions
) -> None:
    """Refuse options that would be ignored, or that PyTorch also refuses."""
    found = list(groups)
    for setting in options.scheduled:
        if not any(setting in group.scalars for group in found):
            known = sorted(
                name
                for name, (key, _) in SETTINGS.items()
                if any(key in group.settings for group in found)
            )
            raise CaptureError(
                f"no parameter group of {type(optimizer).__name__} has the setting {setting!r} "
                "of UpdateOptions.scheduled",
                accepted=", ".join(known),
                todo="leave it out of UpdateOptions.scheduled",
            )
    for group in found:
        for name, parameter in group.parameters.items():
            if parameter.is_complex() and options.clip_value is not None:
                raise CaptureError(
                    f"clip_value={options.clip_value} cannot cut the gradient of {name!r}, which "
                    "is complex",
                    accepted="real parameters",
                    todo="clip by norm: clip_norm",
                )


def _has(group: ParameterGroup, setting: str) -> bool:
    return SETTINGS[setting][0] in group.settings


def _check_names(taken: Iterable[str], states: Iterable[str]) -> None:
    for name in {*taken} & {*states}:
        raise CaptureError(
            f"{name!r} is the name of a parameter or buffer and of a state of the update",
            accepted="other names",
            todo="rename the module",
        )
