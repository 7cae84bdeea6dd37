"""A family of steps: an MLP captured at any size, with the passes that a variant asks for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn
from torch.nn import functional

from sbp_aten.pass_options import PassOptions, Slicing
from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphVariant
from sbp_core.passes import RecomputeOptions
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.testing.programs import OneDeviceStep


class Block(nn.Module):
    """A residual block of two layers, whose inner values can be made again from its argument."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(x)))


class Mlp(nn.Module):
    """Blocks and a head."""

    def __init__(self, width: int, hidden: int, depth: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, classes, bias=False)

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


@dataclass(frozen=True, kw_only=True)
class MlpFamily:
    """Implements `GraphFamily`.

    Args:
        sizes: Width, hidden width, depth, classes.
        batch_size: Samples of a step.
        micro_batches: Their numbers that may be chosen; those that do not divide the batch are not.
        may_recompute, may_slice: Whether the planner may.
    """

    sizes: tuple[int, int, int, int]
    batch_size: int
    micro_batches: tuple[int, ...] = (1,)
    may_recompute: bool = True
    may_slice: bool = True
    _graphs: dict[GraphVariant, LogicalGraph] = field(default_factory=dict)

    @property
    def variant(self) -> GraphVariant:
        return GraphVariant(num_micro_batches=self.micro_batches[0])

    def with_batch(self, batch_size: int) -> MlpFamily:
        if batch_size % self.micro_batches[0]:
            raise ConfigError(f"{batch_size} samples do not divide")
        return replace(self, batch_size=batch_size, _graphs={})

    @cached_property
    def _model(self) -> Mlp:
        return Mlp(*self.sizes)

    def _optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self._model.parameters(), lr=1e-2, foreach=False)

    def step(self, variant: GraphVariant) -> OneDeviceStep:
        """Return a variant with states and two batches to run it on, in float32."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.sizes[0])
        return OneDeviceStep(
            graph=self.graph(variant),
            states=initial_states(self._model, self._optimizer()),
            batches=tuple({"x": torch.randn(shape, generator=generator)} for _ in range(2)),
            scalars={"lr": 1e-2},
        )

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        if variant not in self._graphs:
            count = variant.num_micro_batches
            batch = {"x": torch.zeros(self.batch_size // count, self.sizes[0])}
            captured = capture(
                self._model, lambda model, b: model.loss(b), batch, self._optimizer()
            )
            slices = {s.pattern: Slicing(count=s.count, along=s.along) for s in variant.slices}
            options = PassOptions(
                recompute=RecomputeOptions(memory_bytes=variant.recompute_bytes),
                slices=slices or None,
            )
            self._graphs[variant] = prepare_step(captured, count, options=options)
        return self._graphs[variant]


def family_request(family: MlpFamily, num_ranks: int = 2, *, bytes_per_s: float) -> PlanRequest:
    """Return the request to plan the step of a family, data parallel.

    Args:
        family: Of the step.
        num_ranks: On one axis.
        bytes_per_s: Of the links.
    """
    return PlanRequest(
        graph=family.graph(family.variant),
        mesh=Placement.grid((num_ranks,), ("data",)),
        cluster=Cluster(
            name="test",
            num_devices=num_ranks,
            devices_per_node=num_ranks,
            device=Device(
                memory_bytes=1 << 40, flop_per_s={"float32": 1e9}, memory_bytes_per_s=1e9
            ),
            intra_node=Link(latency_s=1e-6, bytes_per_s=bytes_per_s),
        ),
        family=family,
    )
