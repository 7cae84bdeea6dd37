"""What a plugin of each kind supplies: one protocol or abstract class for each kind.

A hook returns name -> `Factory` (see `plugins.hooks`); `Factory.build` names a callable that takes
the plugin's own frozen `Config` and returns the object described here. Kinds that speak a tensor
library are described where it is known: models, data sets and optimizers in `sbp_torch.kinds`; and
planners and launchers where their subjects are: in `sbp_core.planning` and `sbp_core.processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, BinaryIO, Protocol, runtime_checkable

from sbp_core.plugins.settings import warn_renamed

if TYPE_CHECKING:
    from pathlib import Path

    from sbp_core.cluster import Cluster
    from sbp_core.graph.ir import LogicalGraph


@runtime_checkable
class ChecksCombination(Protocol):
    """A config, of any kind, that checks the combination of all choices.

    An app calls this method of each config before it makes anything. A model checks that the data
    fit it, and a planner that the mesh has the axes that it needs.
    """

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Check the configs of the other kinds against this one.

        Args:
            others: Config of each kind that a run chooses, by kind (`data`, `cluster`). Configs may
                be of any package, so ignore those that you do not know.

        Raises:
            ConfigError: they do not fit. The message names whole keys, such as `data.context`.
        """
        ...


def combination_check(config: object) -> Callable[[Mapping[str, object]], None]:
    """Return the method of a config that checks its combination with others, or a no-op."""
    if isinstance(config, ChecksCombination):
        return config.check_combination
    former: Callable[[Mapping[str, object]], None] | None = getattr(config, "check_beside", None)
    if former is not None:
        warn_renamed(f"{type(config).__name__}.check_beside", "check_combination")
    return former or (lambda others: None)


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
            resumed_step: The step after which the run goes on, for a run that was stopped; 0 for
                one that begins. The sink goes on after what it has of steps up to this one; what
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


class CheckpointStorage(Protocol):
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

    def __call__(self, run_folder: Path) -> CheckpointStorage:
        """Return the storage of the run in a folder; nothing is made there yet."""
        ...


class GraphPass(Protocol):
    """Kind `pass`: `build(config)` returns a pure function graph -> graph."""

    def __call__(self, graph: LogicalGraph) -> LogicalGraph:
        """Return the rewritten graph."""
        ...
