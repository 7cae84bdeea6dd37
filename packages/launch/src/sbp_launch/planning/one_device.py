"""`EagerReference`: runs the first steps on one device in plain PyTorch, to compare losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sbp_aten.pass_options import LossMeaning
from sbp_core.units import format_count
from sbp_launch.planning.flow import PlanSettings
from sbp_torch.graph_capture import counted_random, flatten_batch, rebuild_batch, split_losses


class EagerReference:
    """Runs a program eagerly on one device, with the random numbers of the plan.

    A step takes its whole batch at once, or one micro-batch at a time if each has its own loss.

    Args:
        model: A model with values, which is trained.
        loss: A function `loss(model, batch)`, as `capture` takes it.
        optimizer: An optimizer over the parameters of the model.
        settings: Settings with which the step was planned.
        seed: The seed of random numbers in the step.
        staleness: See `PhysicalPlan.staleness`.
        num_done: Number of steps taken before.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        settings: PlanSettings,
        seed: int,
        staleness: Mapping[str, int],
        num_done: int = 0,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.settings, self.seed, self.staleness = settings, seed, staleness
        self.num_done = num_done
        whole = settings.loss is LossMeaning.WHOLE_BATCH
        deferred = whole and settings.compile.passes.deferred_batch_norm
        self._norms = DeferredBatchNorm(settings.micro_batches) if deferred else nullcontext()
        self.losses: list[float] = []
        self.found: list[float] = []

    def step(self, batch: Any, loss: float, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take one step, and record its loss and the loss of the parallel program.

        Args:
            batch: The batch of the step.
            loss: The loss of the parallel program.
            groups: Settings of each parameter group in this step, such as its `lr`.
        """
        count, flat = self.settings.captured_parts, flatten_batch(batch)
        parts = [
            rebuild_batch(
                batch,
                {
                    name: value.tensor_split(count)[index] if value.dim() else value
                    for name, value in flat.items()
                },
            )
            for index in range(count)
        ]
        if self.settings.loss is LossMeaning.EACH_MICRO_BATCH:
            own = self._updates(parts, groups)
        else:
            self.optimizer.zero_grad()
            own = sum(self._loss(parts, index) / count for index in range(count))
            self._update(groups)
        self.losses.append(own)
        self.found.append(loss)

    def _loss(self, parts: Sequence[Any], index: int) -> float:
        """Return the loss of a micro-batch, after its backward phase."""
        several = self.settings.loss is LossMeaning.EACH_MICRO_BATCH
        count = self.settings.micro_batches_per_update if several else len(parts)
        draw = (self.num_done + len(self.losses)) * len(parts) + index
        name = self.settings.compile.autocast
        device = self.settings.mesh.device
        low = torch.autocast(device, getattr(torch, name)) if name else nullcontext()
        with counted_random(self.seed, draw), low, self._norms:
            own = split_losses(self.loss(self.model, parts[index]))[0]
        (own / count).backward()  # type: ignore[no-untyped-call] # untyped
        return own.item()

    def _updates(self, parts: Sequence[Any], groups: Sequence[Mapping[str, Any]]) -> float:
        """Take several updates, with micro-batches that are computed with stale parameters.

        Returns:
            The mean of their losses.
        """
        parameters = dict(self.model.named_parameters())
        late = {name: parameters[name] for name in self.staleness}
        versions = [{name: one.detach().clone() for name, one in late.items()}]
        total, each = 0.0, self.settings.micro_batches_per_update
        for index in range(len(parts)):
            for name, one in late.items():
                one.data.copy_(versions[max(0, index // each - self.staleness[name])][name])
            if index % each == 0:
                self.optimizer.zero_grad()
            total += self._loss(parts, index)
            if (index + 1) % each:
                continue
            for name, one in late.items():
                one.data.copy_(versions[-1][name])
            self._update(groups)
            versions.append({name: one.detach().clone() for name, one in late.items()})
        return total / len(parts)

    def _update(self, groups: Sequence[Mapping[str, Any]]) -> None:
        self._clip()
        before = [dict(group) for group in self.optimizer.param_groups]
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)
        self.optimizer.step()
        for group, settings in zip(self.optimizer.param_groups, before, strict=True):
            group.update(settings)

    def _clip(self) -> None:
        update = self.settings.update
        parameters = [one for group in self.optimizer.param_groups for one in group["params"]]
        if update.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, update.clip_norm, update.norm_type)
        if update.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, update.clip_value)

    def verdict(self) -> str:
        """Return the largest deviation as text, and the first step that cannot be compared."""
        pairs = list(zip(self.found, self.losses, strict=True))
        finite = [math.isfinite(found) and math.isfinite(own) for found, own in pairs]
        known = finite.index(False) if False in finite else len(pairs)
        parts = []
        if known:
            deviations = [(abs(found - own), abs(own or 1.0)) for found, own in pairs[:known]]
            worst = max(deviation for deviation, _ in deviations)
            relative = max(deviation / scale for deviation, scale in deviations)
            parts.append(
                f"largest deviation of the loss from one device over the first "
                f"{format_count(known, 'step')}: {worst:.2e} ({relative:.2e} relative)"
            )
        if known < len(pairs):
            found, own = pairs[known]
            parts.append(
                f"from step {known + 1} on nothing can be compared: there the loss is {found} on "
                f"the ranks, {own} on one device"
            )
        return "\n".join(parts)


class DeferredBatchNorm(TorchFunctionMode):
    """Normalises the micro-batches of a batch apart; see `sbp_aten.passes.defer_batch_norm`.

    Running statistics, which training does not read, are those of the whole batch.

    Args:
        num_micro_batches: Number of micro-batches in the data of each call.
    """

    def __init__(self, num_micro_batches: int) -> None:
        super().__init__()
        self.num_micro_batches = num_micro_batches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm and kwargs.get("training"):
            return self._normalised(*args, **kwargs)
        return func(*args, **kwargs)

    def _normalised(
        self, x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Any, bias: Any, **how: Any
    ) -> Tensor:
        if mean is not None:
            functional.batch_norm(x.detach(), mean, var, **how)
        parts = x.chunk(self.num_micro_batches)
        return torch.cat([functional.batch_norm(p, None, None, weight, bias, **how) for p in parts])
