"""Interfaces of plugins: one protocol or abstract class for each kind.

A hook returns name -> `Factory` (see `plugins.hooks`); `Factory.build` names a callable that takes
the plugin's own frozen `Config` and returns the object described here. Other modules describe the
rest: `sbp_torch.kinds` has models, data sets and optimizers, because they depend on the tensor
library; `sbp_core.planning` has planners, and `sbp_core.processes` launchers.
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

    An app calls this method of each config before it makes any object. A model checks that the data
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
    """Kind `cluster`: `build(config)` returns the machine's profile, without accessing the machine.

    Its config has `mesh: tuple[int, ...]`, the ranks along each axis of the mesh, and `axes:
    tuple[str, ...]`, a name for each.
    """

    def __call__(self, num_devices: int) -> Cluster:
        """Return the cluster profile for that many ranks."""
        ...


class MetricSink(Protocol):
    """Kind `logger`: `build(config)(run_folder)` returns a sink that metrics are written to."""

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
            run_folder: The folder of the run.
            resumed_step: The step after which a stopped run continues; 0 for a new run. The sink
                keeps its records up to this step, and drops later ones, which are repeated.
        """
        ...


class StagedFolder(Protocol):
    """A folder that is being written, invisible to readers until it is committed.

    Several processes may write into it, each to its own files.
    """

    def create(self, file: str) -> AbstractContextManager[BinaryIO]:
        """Write a file, in place of an earlier one; it is durable when the block has ended.

        After an error inside the block the file does not exist.

        Raises:
            OSError: it cannot be written.
        """
        ...

    def open(self, file: str) -> BinaryIO:
        """Open a file that some process has written.

        Raises:
            OSError: it does not exist, or cannot be read.
        """
        ...

    def commit(self, last_file: str, data: bytes, files: Collection[str]) -> None:
        """Write the last file, and make the folder visible, complete and durable, atomically.

        One process calls it, after all have written their files. It replaces an earlier folder of
        its name, which readers see until then. Files that are not listed are removed.

        Args:
            last_file: The file whose presence makes the folder a committed one.
            data: Its content.
            files: All other files, which exist already.

        Raises:
            OSError: it cannot be committed. The earlier folder still exists.
        """
        ...

    def discard(self) -> None:
        """Remove the written files, as far as possible."""
        ...


class CheckpointStorage(Protocol):
    """Kind `storage`: a store of folders of files, in which checkpoints are kept.

    Names of folders and files consist of letters, digits, `-`, `_` and `.`, and do not begin with
    `.`. No method renames or changes a file, so an object store can implement it.
    """

    def names(self) -> Sequence[str]:
        """Return the folders that are committed and not removed, sorted; empty without a store.

        Raises:
            OSError: they cannot be listed.
        """
        ...

    def sizes(self, name: str) -> Mapping[str, int]:
        """Return the bytes of each file of a committed folder.

        Raises:
            OSError: it does not exist, or cannot be listed.
        """
        ...

    def open(self, name: str, file: str) -> BinaryIO:
        """Open a file of a committed folder; the file is seekable.

        Raises:
            OSError: it does not exist, cannot be read, or is a link out of the folder.
        """
        ...

    def stage(self, name: str) -> StagedFolder:
        """Return a folder to write to; other processes may also write to it."""
        ...

    def remove(self, name: str) -> None:
        """Remove a committed folder: first the file that commits it, then the rest.

        Raises:
            OSError: it cannot be removed.
        """
        ...

    def claim(self) -> AbstractContextManager[None]:
        """Keep other runs from writing here inside the block, as far as the store can.

        One process of a run calls it. Uncommitted folders of earlier runs are removed.

        Raises:
            ConfigError: another run holds it, or it is not writable.
        """
        ...

    def place(self, name: str = "", file: str = "") -> str:
        """Return the path or address of a folder or file, for messages to users."""
        ...


class StorageFactory(Protocol):
    """Makes the storage of one run."""

    def __call__(self, run_folder: Path) -> CheckpointStorage:
        """Return the storage of the run in a folder; nothing is created yet."""
        ...


class GraphPass(Protocol):
    """Kind `pass`: `build(config)` returns a pure function graph -> graph."""

    def __call__(self, graph: LogicalGraph) -> LogicalGraph:
        """Return the rewritten graph."""
        ...
