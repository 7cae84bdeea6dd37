"""What a plugin of each kind supplies: one protocol or abstract class for each kind.

A hook returns name -> `Factory` (see `plugins.hooks`); `Factory.build` names a callable that takes
the plugin's own frozen `Config` and returns the object described here. Imports no torch at run
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from sbp_core.cluster import Cluster
    from sbp_core.graph.ir import LogicalGraph
    from sbp_core.placement import Placement
    from sbp_core.strategy import Strategy


class TrainableModel(Protocol):
    """Kind `model`: `build(config)` returns an `nn.Module` that also has `loss`.

    The trainer seeds torch before it calls `build`, so initialisation is repeatable.
    """

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean loss of a batch: a 0-d floating tensor."""
        ...


@runtime_checkable
class LanguageModel(Protocol):
    """A model that can also continue a text."""

    context: int

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, time <= context) to logits (batch, time, vocabulary)."""
        ...


class Dataset(Protocol):
    """Kind `data`: `build(config)` returns batches as a pure function of their index.

    So the position in the data is one integer, and any rank can make any batch.
    """

    def batch(
        self, index: int, batch_size: int, split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return the batch of that index: tensors whose dim 0 is the sample, by name."""
        ...

    def describe(self) -> str:
        """Return one line: what the data is and how large."""
        ...


@runtime_checkable
class TextDataset(Dataset, Protocol):
    """A data set of text, which can turn tokens to text and back."""

    vocabulary: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a planner is asked.

    Args:
        graph: The training step at micro-batch size, with accumulation made explicit.
        mesh: All ranks, with named axes.
        cluster: Rates and links of the machine.
        pins: User constraints: name pattern (`fnmatch`; `batch` means every batch input) of an
            input, parameter or value -> `"S(0)"` on a 1-axis mesh, `"S(0), B"`, or
            `{axis name: "S(0)"}` which leaves other axes free.
        progress: Called with (what, fraction done in [0, 1]).
    """

    graph: LogicalGraph
    mesh: Placement
    cluster: Cluster
    pins: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    progress: Callable[[str, float], None] | None = None


class Planner(Protocol):
    """Kind `planner`: `build(config)` returns an object that plans."""

    def plan(self, request: PlanRequest) -> Strategy:
        """Return a legal strategy for the graph, or raise `PlanError` saying which limit fails."""
        ...


class OptimizerFactory(Protocol):
    """Kind `optimizer`: `build(config)` returns a maker of `torch.optim` optimizers."""

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer over the parameters."""
        ...


class ClusterFactory(Protocol):
    """Kind `cluster`: `build(config)` returns the machine, without touching it.

    Its config has `mesh: tuple[int, ...]`, the ranks along each axis of the mesh, and
    `axes: tuple[str, ...]`, a name for each.
    """

    def __call__(self, num_devices: int) -> Cluster:
        """Return the cluster profile for that many ranks."""
        ...


class MetricSink(Protocol):
    """Kind `logger`: `build(config)(run_folder)` returns a place where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class MetricSinkFactory(Protocol):
    """Makes a sink for one run."""

    def __call__(self, run_folder: Path) -> MetricSink:
        """Return a sink that writes under the folder."""
        ...


class GraphPass(Protocol):
    """Kind `pass`: `build(config)` returns a pure function graph -> graph."""

    def __call__(self, graph: LogicalGraph) -> LogicalGraph:
        """Return the rewritten graph."""
        ...
