"""Save checkpoints asynchronously: background threads write them while training continues.

                 step 100    101          102          103           104
    main thread  snapshot    vote         vote         vote          vote
    process 0    writes ...... done                    commits ...   complete
    process 1    writes ................. done

A save has two phases. First, every process writes its part from a snapshot of the states. Then
process 0 commits the checkpoint. After each step the processes vote on whether all have finished
the phase; the caller runs this vote. So all processes end a phase after the same step, and an error
of one process is raised in all of them after the same step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sbp_core.errors import RunError, SbpError
from sbp_core.plugins import CheckpointStorage
from sbp_core.runtime import Snapshot
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.saving import Processes
from sbp_launch.checkpoint.writing import commit, write_part

#: Seconds that `finish` waits for the thread of this process.
LIMIT_S = 600.0


class BackgroundSave:
    """One checkpoint that is being written; one thread of each process works on it.

    All processes create it between the same two steps, and then call the same methods in the same
    order until `is_done`.

    Args:
        storage: The storage to write to.
        name: Name of the folder of the checkpoint.
        metadata: The position of the run; equal in all processes.
        snapshot: The slices of states that this process owns; released when they are written.
        processes: The processes of the run.
        after_commit: Called by the first process on its thread, after the commit.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        name: str,
        metadata: Metadata,
        snapshot: Snapshot,
        processes: Processes,
        after_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.is_done = name, False
        self._storage, self._processes, self._after_commit = storage, processes, after_commit
        self._staged = storage.stage(name)
        self._is_committing = False
        self._error: BaseException | None = None

        def write() -> None:
            with snapshot:
                write_part(self._staged, processes.rank, metadata, snapshot)

        self._thread = self._begin(write)

    @property
    def is_busy(self) -> bool:
        """Whether this process still works on the current phase."""
        return self._thread.is_alive()

    def advance(self) -> None:
        """Advance to the next phase; all processes call it when none of them is busy.

        Raises:
            RunError: this or another process cannot write; the checkpoint is given up.
            BoxingError: another process has failed, or did not answer.
        """
        what, where = f"the checkpoint {self.name} cannot be written", self._storage.place()

        def result() -> None:
            if isinstance(self._error, OSError | SbpError):
                raise self._error
            if self._error is not None:
                # A bare exception would skip the vote, and the other processes would wait.
                raise RunError(f"{type(self._error).__name__}: {self._error}") from self._error

        def commit_it() -> None:
            commit(self._staged, self._processes.ranks)
            self._after_commit()

        try:
            self._processes.agree(result, what, where)
        except BaseException:
            self.is_done = True
            if self._processes.is_first:
                self._staged.discard()
            raise
        if self._is_committing:
            self.is_done = True
            return
        self._is_committing = True
        if self._processes.is_first:
            self._thread = self._begin(commit_it)

    def finish(self) -> None:
        """Wait until the checkpoint is complete; all processes call it.

        Raises:
            RunError: see `advance`; or it takes longer than `LIMIT_S`.
            BoxingError: see `advance`.
        """
        while not self.is_done:
            self._thread.join(LIMIT_S)
            if self.is_busy:
                self.is_done = True
                raise RunError(
                    f"the checkpoint {self.name} was not written within {LIMIT_S:g} s",
                    where=self._storage.place(),
                    todo="check that the disk responds",
                )
            self.advance()

    def abandon(self) -> bool:
        """Wait for the thread and give up; return whether the checkpoint is known to be complete.

        Only the first process can know; all other processes return False.
        """
        self._thread.join(LIMIT_S)
        self.is_done = True
        is_through = not self.is_busy and self._error is None
        return self._is_committing and self._processes.is_first and is_through

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # even SystemExit would end a thread silently
                self._error = error

        thread = threading.Thread(target=run, name="sbp checkpoint", daemon=True)
        thread.start()
        return thread


class BackgroundSaves:
    """At most one checkpoint in progress; all processes call the same methods in the same order."""

    def __init__(self) -> None:
        self._current: BackgroundSave | None = None

    @property
    def name(self) -> str:
        """Name of the checkpoint in progress; empty if there is none."""
        return "" if self._current is None else self._current.name

    @property
    def is_busy(self) -> bool:
        """Whether this process works on a checkpoint."""
        return self._current is not None and self._current.is_busy

    def begin(self, save: BackgroundSave) -> None:
        """Begin a checkpoint; the one before it must be complete."""
        assert self._current is None, "there is one at a time"
        self._current = save

    def go_on(self) -> str:
        """Advance the checkpoint in progress, if any; call it when no process is busy.

        Returns:
            Name of the checkpoint if it is complete now; else empty.

        Raises:
            RunError, BoxingError: see `BackgroundSave.advance`; none is in progress any more.
        """
        return self._with_it(BackgroundSave.advance)

    def finish(self) -> str:
        """Wait until the checkpoint in progress is complete; see `go_on`."""
        return self._with_it(BackgroundSave.finish)

    def abandon(self) -> tuple[str, bool]:
        """Give up the checkpoint in progress, after the loss of a process.

        Returns:
            Its name, empty if none was in progress; and the result of `BackgroundSave.abandon`.
        """
        save, self._current = self._current, None
        return ("", False) if save is None else (save.name, save.abandon())

    def _with_it(self, call: Callable[[BackgroundSave], None]) -> str:
        save = self._current
        if save is None:
            return ""
        try:
            call(save)
        finally:
            if save.is_done:
                self._current = None
        return save.name if save.is_done else ""
