"""A checkpoint that is written while steps run, from a snapshot of the session.

                 step 100    101          102          103          104
    main thread  snapshot    asks         asks         asks         asks
    process 0    writes ...... is through              commits ...  it is there
    process 1    writes ................. is through

Behind each step the processes tell each other whether they are through, in a vote that the caller
has: when all are, the first one commits; when that is done, the checkpoint is there for all of
them. So each phase ends after the same step in all processes, and so does what went wrong in it.
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

#: Seconds that `finish` waits for what this process writes.
LIMIT_S = 600.0


class BackgroundSave:
    """One checkpoint on its way to the storage; one thread of each process at a time works on it.

    All processes make it between the same steps, and from then on call the same methods in the same
    order, until `is_done`.

    Args:
        storage: Where.
        name: Of its folder.
        metadata: Where the run is; equal in all processes.
        snapshot: What the ranks of this process own; released when it is written.
        processes: All of them.
        behind_commit: What the first process does when the checkpoint is there, on the thread.
    """

    def __init__(
        self,
        storage: CheckpointStorage,
        name: str,
        metadata: Metadata,
        snapshot: Snapshot,
        processes: Processes,
        behind_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.is_done = name, False
        self._storage, self._processes, self._behind_commit = storage, processes, behind_commit
        self._staged = storage.stage(name)
        self._is_committing = False
        self._error: BaseException | None = None

        def write() -> None:
            with snapshot:
                write_part(self._staged, processes.rank, metadata, snapshot)

        self._thread = self._begin(write)

    @property
    def is_busy(self) -> bool:
        """Whether this process still works on the phase that all are in."""
        return self._thread.is_alive()

    def advance(self) -> None:
        """Go on to the next phase; all processes call it when none of them is busy.

        Raises:
            RunError: it cannot be written, here or in another process; it is given up.
            BoxingError: another process has failed, or did not come.
        """
        what, where = f"the checkpoint {self.name} cannot be written", self._storage.place()

        def result() -> None:
            if isinstance(self._error, OSError | SbpError):
                raise self._error
            if self._error is not None:
                # Or the other processes would wait for this one.
                raise RunError(f"{type(self._error).__name__}: {self._error}") from self._error

        def commit_it() -> None:
            commit(self._staged, self._processes.ranks)
            self._behind_commit()

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
        """Wait until the checkpoint is there; all processes call it.

        Raises:
            RunError: as of `advance`; or it takes longer than `LIMIT_S`.
            BoxingError: as of `advance`.
        """
        while not self.is_done:
            self._thread.join(LIMIT_S)
            if self.is_busy:
                self.is_done = True
                raise RunError(
                    f"the checkpoint {self.name} is not written after {LIMIT_S:g} s",
                    where=self._storage.place(),
                    todo="see whether the disk answers",
                )
            self.advance()

    def abandon(self) -> bool:
        """Wait until this process writes nothing more, and give up; return whether it is there.

        That it is not is what processes other than the first say of it in any case.
        """
        self._thread.join(LIMIT_S)
        self.is_done = True
        is_through = not self.is_busy and self._error is None
        return self._is_committing and self._processes.is_first and is_through

    def _begin(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # SystemExit, too, ends a thread in silence
                self._error = error

        thread = threading.Thread(target=run, name="sbp checkpoint", daemon=True)
        thread.start()
        return thread


class BackgroundSaves:
    """At most one checkpoint under way; all processes call the same methods in the same order."""

    def __init__(self) -> None:
        self._under_way: BackgroundSave | None = None

    @property
    def name(self) -> str:
        """What is under way; empty if nothing is."""
        return "" if self._under_way is None else self._under_way.name

    @property
    def is_busy(self) -> bool:
        """Whether this process works on it."""
        return self._under_way is not None and self._under_way.is_busy

    def begin(self, save: BackgroundSave) -> None:
        """Take on a checkpoint, when the one before it is there."""
        assert self._under_way is None, "there is one at a time"
        self._under_way = save

    def go_on(self) -> str:
        """Go on with what is under way, because no process is busy.

        Returns:
            The name of what is there now; empty if it is not yet, or if nothing was under way.

        Raises:
            RunError, BoxingError: as of `BackgroundSave.advance`; nothing is under way any more.
        """
        return self._with_it(BackgroundSave.advance)

    def finish(self) -> str:
        """Wait until what is under way is there; see `go_on`."""
        return self._with_it(BackgroundSave.finish)

    def abandon(self) -> tuple[str, bool]:
        """Give up what is under way, as another process is lost; see `BackgroundSave.abandon`.

        Returns:
            Its name, empty if nothing was under way; and whether it is there.
        """
        save, self._under_way = self._under_way, None
        return ("", False) if save is None else (save.name, save.abandon())

    def _with_it(self, call: Callable[[BackgroundSave], None]) -> str:
        save = self._under_way
        if save is None:
            return ""
        try:
            call(save)
        finally:
            if save.is_done:
                self._under_way = None
        return save.name if save.is_done else ""
