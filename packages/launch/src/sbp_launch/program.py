"""The one-device program of a run, and the same program run eagerly beside the first steps.

The model is made without memory: its parameters are made shard by shard when a session starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from sbp_core.capture import counted_random, split_losses
from sbp_core.capture.deferred import Deferred, deferred
from sbp_core.placement import Cluster, Placement
from sbp_core.plugins import Registry
from sbp_core.plugins.kinds import ClusterFactory, Dataset, OptimizerFactory
from sbp_launch.config import Choice, RunConfig
from sbp_launch.optimizers import optimizer_over
from sbp_launch.report import counted


class _Model(Protocol):
    def loss(self, batch: Mapping[str, Tensor]) -> Tensor: ...


@runtime_checkable
class _ModelWithMetrics(Protocol):
    def losses(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


def model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """Return the model's own loss of a batch: a 0-d tensor, or the loss and metrics by name."""
    if isinstance(model, _ModelWithMetrics):
        return model.losses(batch)
    return cast(_Model, model).loss(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The one-device program and the machine it is for.

    `model` is without data; `made` can make it whole.
    """

    made: Deferred
    model: nn.Module
    make_optimizer: OptimizerFactory
    optimizer: torch.optim.Optimizer
    data: Dataset
    mesh: Placement
    cluster: Cluster


def make_program(run: RunConfig, registry: Registry) -> Program:
    """Build model, optimizer, data set and cluster from their plugins."""
    dtype: torch.dtype = getattr(torch, run.trainer.dtype)

    def build() -> nn.Module:
        model = cast(nn.Module, make_choice(registry, "model", run.model))
        return model.to(dtype).train()

    made = deferred(build, run.trainer.seed)
    make_optimizer = cast(OptimizerFactory, make_choice(registry, "optimizer", run.optimizer))
    mesh = Placement.grid(run.mesh, run.axes)
    make_cluster = cast(ClusterFactory, make_choice(registry, "cluster", run.cluster))
    return Program(
        made=made,
        model=made.model,
        make_optimizer=make_optimizer,
        optimizer=optimizer_over(make_optimizer, made.model),
        data=cast(Dataset, make_choice(registry, "data", run.data)),
        mesh=mesh,
        cluster=make_cluster(mesh.size),
    )


def make_choice(registry: Registry, kind: str, choice: Choice) -> object:
    """Return what the plugin makes that a group of the config names."""
    return registry.make(kind, choice.name, choice.settings)


class Twin:
    """The one-device program, run beside the first steps: eager model, autograd, `torch.optim`.

    A micro-batch at a time, as batch norm sees it, with the random numbers of the plan.
    """

    def __init__(self, program: Program, run: RunConfig) -> None:
        self.model = program.made.whole_model()
        self.optimizer = optimizer_over(program.make_optimizer, self.model)
        self.settings = run.trainer
        self.losses: list[float] = []
        self.deviations: list[float] = []

    def step(self, batch: Mapping[str, Tensor], loss: float, factor: float) -> None:
        """Take one step and note how far the parallel loss is from it.

        Args:
            batch: Of the step.
            loss: Of the parallel program.
            factor: Of the learning rate.
        """
        self.optimizer.zero_grad()
        count, size = self.settings.micro_batches, self.settings.micro_batch_size
        total = 0.0
        for index in range(count):
            part = {name: value[index * size :][:size] for name, value in batch.items()}
            with counted_random(self.settings.seed, len(self.losses) * count + index):
                own = split_losses(model_loss(self.model, part))[0] / count
            own.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            total += own.item()
        self._clip()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.losses.append(total)
        self.deviations.append(abs(loss - total))

    def _clip(self) -> None:
        update, parameters = self.settings.update, list(self.model.parameters())
        if update.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, update.clip_norm, update.norm_type)
        if update.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, update.clip_value)

    def verdict(self) -> str:
        """Return the line that is printed."""
        worst = max(self.deviations)
        pairs = zip(self.deviations, self.losses, strict=True)
        relative = max(deviation / abs(loss or 1.0) for deviation, loss in pairs)
        return (
            f"largest deviation of the loss from the one-device program over the first "
            f"{counted(len(self.losses), 'step')}: {worst:.2e} ({relative:.2e} relative)"
        )
