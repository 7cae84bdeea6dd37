"""What a plugin of each kind supplies: one protocol or abstract class for each kind.

A hook returns name -> `Factory` (see `plugins.hooks`); `Factory.build` names a callable that takes
the plugin's own frozen `Config` and returns the object described here. Kinds that speak a tensor
library are described where it is known: models, data sets and optimizers in `sbp_torch.kinds`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, BinaryIO, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pathlib import Path

    from sbp_core.boxing import BoxingBackend, LaunchSpec
    from sbp_core.cluster import Cluster
    from sbp_core.compile import CompileOptions
    from sbp_core.graph.ir import LogicalGraph
    from sbp_core.graph_variant import GraphFamily, GraphVariant
    from sbp_core.memory import KeptPlans
    from sbp_core.placement import Placement
    from sbp_core.strategy import Strategy


@runtime_checkable
class ChecksOthers(Protocol):
    """A config, of any kind, that knows what must be chosen beside it.

    Before anything is made, an app asks each config that has this method: a model whether the data
    fit it, a planner whether the mesh has the axes that it needs.
    """

    def check_beside(self, others: Mapping[str, object]) -> None:
        """Check the configs of the other groups beside this one.

        Args:
            others: Config of each kind that a run chooses, by kind (`data`, `cluster`); of any
                package, so what is not known is to be passed over.

        Raises:
            ConfigError: they do not fit; names whole keys, such as `data.context`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The input of a planner: a graph, a mesh, a cluster and the pins of the user.

    Args:
        graph: The training step at micro-batch size, with accumulation made explicit.
        mesh: All ranks, with named axes.
        cluster: Rates and links of the machine.
        pins: User constraints: name pattern (`fnmatch`; `batch` means every batch input) of an
            input, parameter or value -> `"S(0)"` on a 1-axis mesh, `"S(0), B"`, or
            `{axis name: "S(0)"}` which leaves other axes free.
        progress: Called with (what, fraction done in [0, 1]).
        options: How the plan will be compiled; the compiler's defaults for the cluster if None.
        regather: Of the strategies that are made; see `Strategy`.
        family: The variants of the step, for planners that choose among them; None if `graph` is
            the only one. A strategy for another graph of it names its `variant`.
        offloaded: States that lie in the memory of the host (`Storage.offloaded`), whoever decided
            that: every strategy for the request has them there, and is priced with their copies.
        kept: Where planners that compile what they consider may leave their plans, so that what
            they choose need not be compiled again; None if nobody asks for them.

    Raises:
        ConfigError: the mesh has ranks that the cluster does not have.
    """

    graph: LogicalGraph
    mesh: Placement
    cluster: Cluster
    pins: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    progress: Callable[[str, float], None] | None = None
    options: CompileOptions | None = None
    regather: tuple[str, ...] = ("*",)
    family: GraphFamily | None = None
    offloaded: frozenset[str] = frozenset()
    kept: KeptPlans | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        self.cluster.check_ranks(self.mesh)

    def of(self, variant: GraphVariant) -> PlanRequest:
        """Return the request to plan a variant of the step, and no other.

        Raises:
            SbpError: see `GraphFamily.graph`.
        """
        assert self.family is not None, "only a family has variants"
        return replace(self, graph=self.family.graph(variant), family=None)


class Planner(Protocol):
    """Kind `planner`: `build(config)` returns an object that plans."""

    def plan(self, request: PlanRequest) -> Strategy:
        """Return a legal strategy for the graph, or raise `PlanError` saying which limit fails."""
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

    def __call__(self, run_folder: Path, *, resumed_step: int = 0) -> MetricSink:
        """Return a sink that writes under the folder.

        Args:
            run_folder: Of the run.
            resumed_step: The step behind which the run goes on, for a run that was stopped; 0 for
                one that begins. The sink goes on behind what it has of steps up to this one; what
                it has of later ones, which are done again, it drops.
        """
        ...


class StagedFolder(Protocol):
    """A folder that is being written, of which no reader knows before it is committed.

    Several processes may write into it, each other files.
    """

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Write a file, in place of an earlier one; it is durable when the block has ended.

        After an error inside the block the file is not there.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def open(self, file: str) -> BinaryIO:
        """Open a file that some process has written.

        Raises:
            OSError: it is not there, or cannot be read.
        """
        ...

    def commit(self, last_file: str, data: bytes, files: Collection[str]) -> None:
        """Write the last file, and let the folder appear, whole and durable, at once.

        One process calls it, when all have written theirs. It takes the place of an earlier folder
        of its name, which readers see until then. Other files than these are removed.

        Args:
            last_file: Whose presence is what makes the folder one that is committed.
            data: What it holds.
            files: The others, which are there.

        Raises:
            OSError: it cannot be committed. The earlier one is still there.
        """
        ...

    def discard(self) -> None:
        """Remove what was written, as far as that is possible."""
        ...


class Storage(Protocol):
    """Kind `storage`: a place of folders of files, in which checkpoints are kept.

    Names of folders and files are of letters, digits, `-`, `_` and `.`, and begin with none of `.`.
    Nothing here needs a file to be renamed or changed, so that an object store can do it.
    """

    def names(self) -> Sequence[str]:
        """Return the folders that are committed and not removed, sorted; none without a place.

        Raises:
            OSError: they cannot be listed.
        """
        ...

    def sizes(self, name: str) -> Mapping[str, int]:
        """Return the bytes of each file of a folder that is committed.

        Raises:
            OSError: it is not there, or cannot be listed.
        """
        ...

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file of a folder that is committed; it can be sought in.

        Raises:
            OSError: it is not there, cannot be read, or is a link out of the folder.
        """
        ...

    def stage(self, name: str) -> StagedFolder:
        """Return a folder to write to, which other processes may write to."""
        ...

    def remove(self, name: str) -> None:
        """Remove a folder that is committed: first the file that makes it so, then the rest.

        Raises:
            OSError: it cannot be removed.
        """
        ...

    def claim(self) -> AbstractContextManager[None]:
        """Keep others from writing here inside the block, as far as the place can.

        One process of a run calls it. What earlier ones have begun and not committed is removed.

        Raises:
            ConfigError: another run holds it, or nothing can be written here.
        """
        ...

    def place(self, name: str = "", file: str = "") -> str:
        """Return what users call a folder or file: its path or address."""
        ...


class StorageFactory(Protocol):
    """Makes the storage of one run."""

    def __call__(self, run_folder: Path) -> Storage:
        """Return the storage of the run in a folder; nothing is made there yet."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What a launcher is to start.

    Args:
        command: Program and arguments of every rank; begins with `sys.executable`. A rank learns
            from its environment which one it is, as under torchrun, mpiexec or Slurm's srun.
        num_ranks: Processes to start, one a rank, >= 1.
        backend: What will connect them, not open: knows how they are started on this machine.
        folder: Of the run; absolute, and the same on all hosts. What a launcher leaves goes there.
    """

    command: tuple[str, ...]
    num_ranks: int
    backend: BoxingBackend
    folder: Path


class Launcher(Protocol):
    """Kind `launcher`: `build(config)` returns what starts the processes of a run.

    Its config has `spans_processes: bool`, as that of a boxing backend has: whether each rank is a
    process. The two have to say the same.
    """

    def launch_specs(self, request: LaunchRequest) -> Sequence[LaunchSpec]:
        """Return what is to be started on this machine, and kept alive until all ranks have ended.

        That is each rank, or one program that starts them elsewhere, passes on what they write and
        ends them when it gets SIGTERM. Its exit code is 0 if they ended well.

        Raises:
            ConfigError: what is needed is not installed, or cannot start so many.
        """
        ...


class GraphPass(Protocol):
    """Kind `pass`: `build(config)` returns a pure function graph -> graph."""

    def __call__(self, graph: LogicalGraph) -> LogicalGraph:
        """Return the rewritten graph."""
        ...
