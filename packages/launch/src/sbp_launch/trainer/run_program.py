"""Build the one-device program of an `sbp-train` run: model, optimizer, data, from its config.

The model is built without memory; its parameters are made shard by shard when a session starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError
from sbp_core.placement import Placement
from sbp_core.plugins import ClusterFactory
from sbp_launch.data import DataCursor, Order, SampleOrder, SampleSource, checked_dataset
from sbp_launch.optimizers import optimizer_over
from sbp_launch.run.run import Run
from sbp_launch.settings.config import RunConfig
from sbp_launch.settings.patterns import check_patterns
from sbp_launch.step.program import OneDeviceProgram
from sbp_torch.deferred_init import DeferredModel, deferred
from sbp_torch.graph_capture import UpdateOptions
from sbp_torch.kinds import Dataset, OptimizerFactory, TextDataset


class _Model(Protocol):
    def loss(self, batch: Mapping[str, Tensor]) -> Tensor: ...


@runtime_checkable
class _ModelWithMetrics(Protocol):
    def losses(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]: ...


def model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """Return the model's own loss of a batch: a 0-d tensor, or the loss and metrics by name.

    Raises:
        ConfigError: the model reads an entry that the batch does not have.
    """
    given = _GivenBatch(batch)
    if isinstance(model, _ModelWithMetrics):
        return model.losses(given)
    return cast(_Model, model).loss(given)


class _GivenBatch(dict[str, Tensor]):
    """A batch whose error for a missing entry lists the entries that it has."""

    def __missing__(self, name: str) -> Tensor:
        given = [
            f"{name} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
            for name, value in self.items()
        ]
        raise ConfigError(
            f"the model asks its batch for {name!r}, which the data do not give",
            accepted=f"what they give: {', '.join(given) or 'nothing'}",
            todo="choose data that fit the model, or another model",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgram:
    """The one-device program of a run, its data, and the machine to run on.

    `model` has no values; `made` can make them.

    Args:
        update: Operations once a step in addition to the optimizer.
        source: The samples of `data`.
        order: The order in which the samples are used in training.
        seed: The seed of that order.
    """

    made: DeferredModel
    model: nn.Module
    make_optimizer: OptimizerFactory
    optimizer: torch.optim.Optimizer
    data: Dataset
    source: SampleSource
    order: Order
    seed: int
    mesh: Placement
    cluster: Cluster
    update: UpdateOptions

    @property
    def one_device(self) -> OneDeviceProgram:
        """Model, loss and optimizer, in the form that a step takes."""
        return OneDeviceProgram(
            model=self.model,
            loss=model_loss,
            optimizer=self.optimizer,
            update=self.update,
            deferred=self.made,
            anew="start another run with trainer.init_from=RUN, with the program as it is now",
        )

    def cursor(self, split: str = "train") -> DataCursor:
        """Return a cursor at the beginning of a split.

        Held-out data are shuffled, in the same order in all runs, so that a part represents all.

        Raises:
            PluginError: the data set does not return its number of samples.
            SbpLookupError: it has no such split.
            SbpError: a sample that this reads cannot be loaded; names it.
        """
        size = self.source.num_samples(split)
        if split != "train":
            return DataCursor(order=SampleOrder(num_samples=size))
        fingerprint = self.source.fingerprint(split)
        return DataCursor(
            order=SampleOrder(
                num_samples=size, order=self.order, seed=self.seed, fingerprint=fingerprint
            )
        )

    def batch(self, cursor: DataCursor, batch_size: int, split: str = "train") -> dict[str, Tensor]:
        """Return the whole batch that starts at a cursor.

        Raises:
            SbpError: a sample cannot be loaded; names it.
        """
        rows = np.arange(batch_size)
        return self.source.load(cursor.numbers(rows), split, cursor.epochs(rows))

    def example(self, batch_size: int) -> dict[str, Tensor]:
        """Return an example with the shapes of a training batch: one sample, repeated."""
        return self.source.load(np.zeros(batch_size, np.int64), "train")

    @property
    def counted(self) -> tuple[str, int]:
        """The unit in which data are counted, tokens or samples, and the number per sample."""
        if not isinstance(self.data, TextDataset):
            return "samples", 1
        return "tokens", next(iter(self.example(1).values())).numel()


def make_program(run: Run) -> RunProgram:
    """Build model, optimizer, data set and cluster from their plugins.

    Raises:
        ConfigError: a plugin refuses its settings, or a pattern of names matches nothing.
        PluginError: a plugin returns an object of the wrong type.
    """
    config = run.config
    dtype: torch.dtype = getattr(torch, config.trainer.dtype)

    def build() -> nn.Module:
        model = run.make("model")
        if not isinstance(model, nn.Module):
            raise run.entry("model").returned(model, "an nn.Module")
        return model.to(dtype).train()

    # The data come first: this finds a wrong path quickly, and making a model takes longer.
    data = checked_dataset(run.make("data"), run.entry("data"))
    made = deferred(build, config.trainer.seed)
    _check_patterns(config, made.model)
    make_optimizer: OptimizerFactory = run.make("optimizer")
    optimizer = optimizer_over(make_optimizer, made.model)
    if optimizer is None:
        raise run.entry("optimizer").returned(None, "an optimizer", by="__call__")
    make_cluster: ClusterFactory = run.make("cluster")
    cluster = make_cluster(math.prod(config.mesh))
    mesh = Placement.grid(config.mesh, config.axes, cluster.device.kind)
    return RunProgram(
        made=made,
        model=made.model,
        make_optimizer=make_optimizer,
        optimizer=optimizer,
        data=data,
        source=SampleSource(data=data, plugin=run.entry("data"), dtype=dtype),
        order=config.trainer.order,
        seed=config.trainer.seed,
        mesh=mesh,
        cluster=cluster,
        update=config.trainer.update,
    )


def _check_patterns(config: RunConfig, model: nn.Module) -> None:
    """Check the patterns of parameters that would be ignored if they matched nothing.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    apart = config.compile.passes.accumulate_addends
    check_patterns("compile.regather", config.compile.regather, names, "parameter")
    check_patterns("compile.passes.accumulate_addends", apart, names, "parameter")
