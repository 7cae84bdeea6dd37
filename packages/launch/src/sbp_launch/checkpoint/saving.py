"""Save and load a checkpoint collectively: all processes of a run together.

    process 0     writes its file --+                       +-- commits --+
    process 1     writes its file --+-- have all written? --+             +-- complete
    process 2     writes its file --+                                     |

No process continues before all know the result. Each process reads and writes its own part only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from sbp_core.errors import ConfigError, RunError, SbpError, words_of
from sbp_core.graph import ITEMSIZE
from sbp_core.plugins import CheckpointStorage
from sbp_core.runtime import Snapshot, StatePiece, StateSlice
from sbp_launch.checkpoint.cover import split_into_blocks
from sbp_launch.checkpoint.manifest import DamagedError, Metadata
from sbp_launch.checkpoint.names import match_names
from sbp_launch.checkpoint.places import newest_first
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.tensors import PART_BYTES, Chosen, LazyTensors, dtype_name
from sbp_launch.checkpoint.writing import commit, place_of, write_part

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The processes of a run, seen from one of them.

    Args:
        rank: The lowest rank of this process.
        ranks: The lowest rank of every process, in order; the first process commits.
        gather: Collective call that returns the texts of all processes, in order.
        elsewhere: Advice in messages: how to save to another place.
    """

    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    gather: Callable[[str], Sequence[str]] = lambda text: [text]
    elsewhere: str = "name another folder"

    @property
    def is_first(self) -> bool:
        """Whether this process commits and removes."""
        return self.rank == self.ranks[0]

    def agree(self, action: Callable[[], object], what: str, where: str) -> None:
        """Run an action in every process, and check that it succeeds in all.

        Args:
            action: The action of this process.
            what: Start of the error message: what has failed.
            where: The place, for messages.

        Raises:
            RunError: it failed here, or in another process.
            BoxingError: another process has failed, or did not answer.
        """
        problem: OSError | SbpError | None = None
        try:
            action()
        except (OSError, SbpError) as error:
            problem = error
        texts = self.gather("" if problem is None else _text(problem))
        if isinstance(problem, SbpError):
            raise problem
        if problem is not None:
            raise RunError(
                f"{what}: {_text(problem)}", where=where, todo=f"make room, or {self.elsewhere}"
            ) from problem
        for rank, text in zip(self.ranks, texts, strict=True):
            if text:
                raise RunError(f"{what}: rank {rank} says: {text}", where=where)


def save(
    storage: CheckpointStorage,
    name: str,
    metadata: Metadata,
    pieces: Iterable[StatePiece] | Snapshot,
    processes: Processes,
) -> None:
    """Save a checkpoint; all processes call this between the same steps.

    When this returns, the checkpoint is complete and durable. On an error, there is none; an
    earlier checkpoint with the same name is replaced only at the commit.

    Args:
        storage: The storage to write to.
        name: Name of the folder of the checkpoint.
        metadata: The position of the run; equal in all processes.
        pieces: Slices of states that the ranks of this process own, such as `Session.pieces()`.
        processes: The processes of the run.

    Raises:
        RunError: it cannot be written, or the states cannot be read.
        BoxingError: another process has failed, or did not answer.
    """
    staged = storage.stage(name)
    what, where = f"the checkpoint {name} cannot be written", storage.place()
    try:
        processes.agree(lambda: write_part(staged, processes.rank, metadata, pieces), what, where)
        processes.agree(
            lambda: commit(staged, processes.ranks) if processes.is_first else None, what, where
        )
    except BaseException:
        if processes.is_first:
            staged.discard()
        raise


def prune(storage: CheckpointStorage, keep: int, kept: Collection[str] = ()) -> None:
    """Remove all checkpoints of steps except the newest; failures to remove are logged.

    Args:
        storage: The storage of the checkpoints.
        keep: Number of newest checkpoints that stay; 0 for all.
        kept: Names of further checkpoints that stay.
    """
    if keep:
        remove(storage, [name for name in newest_first(storage)[keep:] if name not in kept])


def remove(storage: CheckpointStorage, names: Iterable[str]) -> None:
    """Remove checkpoints; log a warning for a checkpoint that cannot be removed."""
    for name in names:
        try:
            storage.remove(name)
        except OSError as error:
            logger.warning("%s is not removed: %s", storage.place(name), error.strerror or error)


def open_together(storage: CheckpointStorage, name: str, processes: Processes) -> Checkpoint:
    """Open a checkpoint in every process; all of them call this.

    Raises:
        DamagedError: its manifest or a file is missing or damaged, as seen by any process.
        ConfigError: the processes open different checkpoints.
        BoxingError: another process has failed, or did not answer.
    """
    return _together(processes, name, lambda: Checkpoint(storage, name))


def verify_together(checkpoint: Checkpoint, processes: Processes) -> None:
    """Verify all of a checkpoint, a share in each process; all of them call this.

    Raises:
        DamagedError: a part of it is damaged.
        BoxingError: another process has failed, or did not answer.
    """
    share = processes.ranks.index(processes.rank), len(processes.ranks)

    def verify() -> None:
        with checkpoint:
            checkpoint.verify(share=share)

    _together(processes, checkpoint.name, verify)


def _together(processes: Processes, name: str, action: Callable[[], T]) -> T:
    """Run an action on a checkpoint in every process; raises as `open_together`."""
    made, problem = [], None
    try:
        made.append(action())
    except DamagedError as error:
        problem = error
    if (found := damage_of_any(processes, name, problem)) is not None:
        raise found
    return made[0]


def damage_of_any(
    processes: Processes, read: str, problem: DamagedError | None
) -> DamagedError | None:
    """Return the error about damage that any process found, else None; all processes call this.

    Raises:
        ConfigError: the processes have read different checkpoints.
        BoxingError: another process has failed, or did not answer.
    """
    texts = processes.gather(f"{read}\n{_text(problem) if problem else ''}")
    for rank, text in zip(processes.ranks, texts, strict=True):
        found, _, said = text.partition("\n")
        if found != read:
            raise ConfigError(
                f"rank {rank} reads {found}, and rank {processes.rank} {read}",
                accepted="one checkpoint for all",
                todo="name a folder that all hosts share",
            )
        if said and problem is None:
            return DamagedError(f"rank {rank} says: {said}")
    return problem


class ReadTogether(LazyTensors):
    """A checkpoint of which every process reads its part; `agree` tells whether all is intact.

    After damage, all reads return zeros and `problem` has the error: a process that stopped here
    would leave the other processes waiting. The values must not be used before `agree`.

    Args:
        checkpoint: The open checkpoint.
        reading: Called before a part is read, but not for names and shapes.
    """

    def __init__(self, checkpoint: Checkpoint, reading: Callable[[], None] = lambda: None) -> None:
        self.checkpoint, self._reading = checkpoint, reading
        self.problem: DamagedError | None = None
        self._tensors: LazyTensors = checkpoint

    @property
    def names(self) -> Collection[str]:
        """The names of the states."""
        return self._tensors.names

    def call(self, own: Collection[str]) -> None:
        """Use the names of a step, in which other modules may be wrapped than in the checkpoint."""
        self._tensors = Chosen(self.checkpoint, match_names(self.checkpoint.names, own))

    def like(self, name: str) -> Tensor:
        """See `LazyTensors.like`."""
        return self._tensors.like(name)

    def part(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        """Return a part of a state; zeros after damage."""
        self._reading()
        return self._read(name, bounds) if bounds else self._scalars[name].clone()

    def ahead(self, name: str) -> Tensor:
        """Return a whole state, before any state is replaced; zeros after damage."""
        shape = self.like(name).shape
        return self._read(name, [(0, size) for size in shape]) if shape else self._scalars[name]

    @cached_property
    def _scalars(self) -> Mapping[str, Tensor]:
        """The states without dims; all are zero after damage, as ranks need equal numbers."""
        found = {name: self._read(name, ()) for name in self.names if not self.like(name).dim()}
        if self.problem is None:
            return found
        return {name: torch.zeros_like(value) for name, value in found.items()}

    def _read(self, name: str, bounds: Sequence[tuple[int, int]]) -> Tensor:
        try:
            if self.problem is None:
                return self._tensors.part(name, bounds)
        except DamagedError as error:
            self.problem = error
        return torch.zeros([stop - start for start, stop in bounds], dtype=self.like(name).dtype)

    def agree(self, processes: Processes) -> DamagedError | None:
        """Return the error about damage that any process found; None if all is intact.

        Raises:
            ConfigError: the processes have read different checkpoints.
            BoxingError: another process has failed, or did not answer.
        """
        self.checkpoint.close()
        step = self.checkpoint.manifest.metadata.step
        return damage_of_any(processes, f"{self.checkpoint.name} of step {step}", self.problem)


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return words_of(error)


class _Converted(Snapshot):
    """Slices of tensors, each read when it is written."""

    def __init__(self, tensors: LazyTensors, slices: Sequence[StateSlice], step: int) -> None:
        self._tensors, self._slices, self.steps_done = tensors, slices, step

    def slices(self) -> Sequence[StateSlice]:
        return self._slices

    def pieces(self) -> Iterator[StatePiece]:
        for one in self._slices:
            yield one.with_value(self._tensors.part(one.name, one.bounds))

    def release(self) -> None:
        """See `Snapshot.release`; nothing is kept."""


def write_checkpoint(
    storage: CheckpointStorage, name: str, tensors: LazyTensors, metadata: Metadata
) -> None:
    """Write tensors as a checkpoint of a run with one process; an existing one is replaced.

    Args:
        storage: The storage to write to.
        name: Name of the folder of the checkpoint.
        tensors: Tensors by the names of `Session.state_dict`; 64 MiB at a time are in memory.
        metadata: The position of the run.

    Raises:
        ConfigError: a tensor has a dtype that no state has.
        RunError: it cannot be written.
    """
    parts: list[StateSlice] = []
    for own in tensors:
        like = tensors.like(own)
        if dtype_name(like) not in ITEMSIZE:
            raise ConfigError(
                f"{own!r} is {dtype_name(like)}, which no state has", accepted=", ".join(ITEMSIZE)
            )
        shape, dtype = tuple(like.shape), dtype_name(like)
        parts += [
            StateSlice(name=own, shape=shape, dtype=dtype, bounds=bounds)
            for bounds in split_into_blocks(shape, like.element_size(), PART_BYTES)
        ]
    parts.sort(key=place_of)
    save(storage, name, metadata, _Converted(tensors, parts, metadata.step), Processes())
