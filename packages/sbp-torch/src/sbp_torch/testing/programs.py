"""The training step of a small MLP that the conformance suites plan and run, and assertions.

`capture_tiny` returns the step; `one_device_run` returns the losses and states of one device, which
every plan of the step must give. `raises`, `assert_near` and `assert_equal` replace pytest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (torch's own abbreviation)

from sbp_aten.pass_options import LossMeaning
from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import Number
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph

__all__ = ["small_cluster"]

_E = TypeVar("_E", bound=BaseException)


class RunningNorm(nn.Module):
    """A batch norm of (n, width) made of basic operators, with the buffers of `nn.BatchNorm1d`.

    Each forward updates the running statistics and the counter of batches.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """Return (n, width), normalised over n."""
        mean = x.mean(0)
        variance = ((x - mean) ** 2).mean(0)
        with torch.no_grad():
            self.running_mean.mul_(0.9).add_(mean, alpha=0.1)
            self.running_var.mul_(0.9).add_(variance, alpha=0.1)
            self.num_batches_tracked.add_(1)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias


class TinyMlp(nn.Module):
    """An MLP from features (n, 6) to the logits of 7 classes: `up`, gelu, `norm`, `blocks`, `down`.

    Few mesh sizes divide its extents, so that shards are uneven.

    Args:
        has_statistics: Whether `norm` is a batch norm, whose running statistics each micro-batch
            updates, instead of a layer norm.
        num_rows: Number of rows of an embedding of the class, which is added to the features;
            0 for no embedding.
        num_blocks: Number of residual blocks. The input of the first is added again after the last:
            in a pipeline, a connection that skips stages.
    """

    def __init__(
        self, *, has_statistics: bool = False, num_rows: int = 0, num_blocks: int = 0
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(num_rows, 6) if num_rows else None
        self.up = nn.Linear(6, 10)
        self.norm = RunningNorm(10) if has_statistics else nn.LayerNorm(10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(num_blocks))
        self.down = nn.Linear(10, 7)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean cross-entropy of `features` (n, 6) and int64 `classes` (n,)."""
        features = batch["features"]
        if self.table is not None:
            features = features + self.table(batch["classes"])
        hidden = first = self.norm(F.gelu(self.up(features)))
        for block in self.blocks:
            hidden = hidden + block(F.gelu(hidden))
        if self.blocks:
            hidden = hidden + first
        return F.cross_entropy(self.down(hidden), batch["classes"])


def tiny_batch(batch_size: int, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return a batch for `TinyMlp`, equal for equal seeds."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(batch_size, 6, generator=generator, dtype=dtype),
        "classes": torch.randint(0, 7, (batch_size,), generator=generator),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeviceStep:
    """A prepared training step, with states and batches to run it.

    Args:
        graph: The graph, as planners get it.
        states: Whole initial states, by the names of `initial_states`.
        batches: One whole batch (all micro-batches) for each step to run.
        scalars: Scalar inputs by name.
    """

    graph: LogicalGraph
    states: Mapping[str, Tensor]
    batches: tuple[Mapping[str, Tensor], ...]
    scalars: Mapping[str, Number]


def tiny_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's own loss."""
    assert isinstance(model, TinyMlp), "the loss of another model"
    return model.loss(batch)


@cache
def capture_tiny(
    num_micro_batches: int = 1,
    micro_batch_size: int = 6,
    num_steps: int = 3,
    *,
    has_statistics: bool = False,
    num_rows: int = 0,
    num_blocks: int = 0,
    loss: LossMeaning = LossMeaning.MEAN_OF_MICRO_BATCHES,
    micro_batches_per_update: int = 1,
) -> OneDeviceStep:
    """Return the training step of a `TinyMlp` under AdamW, in float64."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = TinyMlp(
            has_statistics=has_statistics, num_rows=num_rows, num_blocks=num_blocks
        ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    graph = capture(model, tiny_loss, tiny_batch(micro_batch_size, 0), optimizer, name="tiny")
    batches = (tiny_batch(micro_batch_size * num_micro_batches, 1 + i) for i in range(num_steps))
    return OneDeviceStep(
        graph=prepare_step(
            graph, num_micro_batches, loss=loss, micro_batches_per_update=micro_batches_per_update
        ),
        states=initial_states(model, optimizer),
        batches=tuple(batches),
        scalars={"lr": 1e-2},
    )


@cache
def capture_tiny_forward(batch_size: int) -> LogicalGraph:
    """Return forward and loss of the `TinyMlp` of `capture_tiny`, as one micro-batch."""
    model = TinyMlp(has_statistics=False).double()
    graph = capture(model, tiny_loss, tiny_batch(batch_size, 0), name="tiny forward")
    return prepare_step(graph, 1)


def one_device_run(
    step: OneDeviceStep, staleness: Mapping[str, int] | None = None
) -> tuple[list[Tensor], dict[str, Tensor | Number]]:
    """Run all batches on one device.

    Args:
        step: The step and its batches.
        staleness: See `run_graph`.

    Returns:
        The loss of each step, and the final states by the names of the graph's inputs.
    """
    count = step.graph.num_micro_batches
    states = graph_states(step.graph, step.states)
    losses = []
    with torch.no_grad():
        for batch in step.batches:
            parts = split_batch(batch, count)
            found, states = run_graph(step.graph, states, parts, step.scalars, staleness)
            losses.append(found["loss"])
    return losses, states


def graph_states(graph: LogicalGraph, states: Mapping[str, Tensor]) -> dict[str, Tensor | Number]:
    """Return states by the names of a graph's inputs: one number for tied step counters."""
    return {
        entry.name: states[entry.stands_for[0]].item() if entry.stands_for else states[entry.name]
        for entry in graph.inputs
        if entry.kind.is_state
    }


def split_batch(batch: Mapping[str, Tensor], count: int) -> list[Mapping[str, Tensor]]:
    """Cut a whole batch into micro-batches along dim 0; 0-d tensors are in all of them."""
    parts = {
        name: torch.chunk(value, count) if value.dim() else [value] * count
        for name, value in batch.items()
    }
    return [{name: part[index] for name, part in parts.items()} for index in range(count)]


def small_cluster(num_devices: int) -> Cluster:
    """Return a machine on which compute and messages take time."""
    return Cluster(
        name="small",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device=Device(
            memory_bytes=1 << 30,
            flop_per_s={"float32": 1e9, "float64": 5e8},
            memory_bytes_per_s=1e9,
            launch_s=1e-6,
        ),
        intra_node=Link(latency_s=1e-6, bytes_per_s=1e8),
    )


@contextmanager
def raises(kind: type[_E], match: str = "") -> Iterator[list[_E]]:
    """Check that the `with` block raises an error, like `pytest.raises`, without pytest.

    Yields:
        A list that contains the error after the block.
    """
    caught: list[_E] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
        assert match in str(error), f"{match!r} is not in: {error}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def assert_near(what: str, found: object, wanted: object, tolerance: float) -> None:
    """Check that two tensors or numbers agree in shape, dtype and, within a tolerance, elements.

    The tolerance is relative for elements above 1, else absolute.
    """
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, wanted {wanted.shape}"
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, wanted {wanted.dtype}"
    allowed = tolerance * wanted.double().abs().clamp(min=1.0)
    apart = (found.double() - wanted.double()).abs()
    # Written so that NaN counts as a difference.
    assert bool((apart <= allowed).all()), f"{what}: apart by {apart.max().item()}"


def assert_equal(what: str, found: object, wanted: object) -> None:
    """Check that two tensors or numbers are equal bit for bit."""
    found, wanted = torch.as_tensor(found), torch.as_tensor(wanted)
    same = found.dtype == wanted.dtype and torch.equal(found, wanted)
    assert same, f"{what} is not bit-equal: {found.flatten()[:8]} and {wanted.flatten()[:8]}"
