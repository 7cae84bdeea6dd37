"""Copy parameters and optimizer states for a checkpoint, while the next step already computes.

One thread copies the states that the next update overwrites, in the order of the updates. An update
whose copy is missing makes the copy itself, or waits for the thread if it has begun.

    snapshot            |
    rank            ... | forward  backward  commit | update a  update b  copy c, update c
    copying thread      |  copy a  . . .  copy b  . . . . . . .   copy d

States that no update overwrites are not copied, because their new values are in other memory.

With a limit in bytes, the thread and the updates wait until the reader has finished with some
copies before they make more:

    reader              |          write a  write b  write c  write d
    rank            ... | forward  backward  commit | update a  update b  (waits) update c
    copying thread      |  copy a  copy b  (full) copy c  . . . copy d
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import itemsize
from sbp_core.errors import RunError
from sbp_core.runtime import Number, Snapshot, StatePiece, StateSlice
from sbp_core.units import format_bytes
from sbp_torch.runtime.devices import HostCopy, RankDevice
from sbp_torch.runtime.state_layout import Part, StateLayout, Values

logger = logging.getLogger(__name__)

#: Seconds that an update waits for room under the limit before it logs a warning.
TOLD_S = 1.0


class StateSnapshot(Snapshot):
    """The states of a store that the local ranks own, with their values at one moment.

    Args:
        values: Rank -> states of the store. The store replaces these mappings and never changes
            them.
        tied_dtypes: State that is kept as a host number -> dtype.
        layout: Names, slots and owned slices of the states.
        copier: The object that makes the copies.
        since: The event after all earlier work on the device (`RankDevice.now`).
        steps_done: Number of steps that the session had done.
        limit_bytes: Largest size of all copies at a time; None for no limit.
        patience_s: Seconds that an update waits for room before copies exceed the limit.
    """

    def __init__(
        self,
        values: Mapping[int, Values],
        tied_dtypes: Mapping[str, torch.dtype],
        layout: StateLayout,
        copier: Copier,
        since: Any,
        steps_done: int,
        limit_bytes: int | None = None,
        patience_s: float = inf,
    ) -> None:
        self.steps_done = steps_done
        self._layout, self._copier = layout, copier
        self._limit_bytes, self._patience_s = limit_bytes, patience_s
        self._is_limited = limit_bytes is not None
        self._values, self._tied_dtypes, self._since = values, tied_dtypes, since
        is_over = self._copier.is_closed
        self._to_copy: Mapping[Part, None] = {} if is_over else self._layout.overwritten
        self._changed = threading.Condition()
        self._begun: set[Part] = set()
        self._made: dict[Part, HostCopy | Exception] = {}
        self._held_bytes = 0  # size of all copies that are begun or made
        self._released = threading.Event()
        #: Whether the copying thread still has to copy this, or does; and whether it lacks room.
        self._is_awaited = self._is_full = False
        #: With a limit: the part that the reader reads without a copy; and the parts it has read.
        self._read_in_place: Part | None = None
        self._read: set[Part] = set()
        #: When the first update began to wait for room, and whether a warning was logged.
        self._waits_since: float | None = None
        self._is_told = False

    def copy(self, part: Part, *, for_update: bool = True) -> HostCopy | Exception | None:
        """Return the copy of a part, or the error of the attempt; make it if no thread does.

        Waits for room under the limit, and while the reader reads the part without a copy.

        Args:
            part: The part of a state.
            for_update: Whether an update of a rank waits for the copy.

        Returns:
            The copy or the error. None if the part needs no copy, was read already, or the snapshot
            is released.
        """
        with self._changed:
            while not self._is_settled(part):
                value = self._layout.owned_part(part, self._values[part[0]][part[1]])
                assert isinstance(value, Tensor), "host numbers are not overwritten"
                if part in self._begun or part == self._read_in_place:
                    self._changed.wait()
                elif self._has_room(value.nbytes):
                    self._begun.add(part)
                    self._held_bytes += value.nbytes
                    room_bytes = self._room_bytes
                    break
                elif for_update:
                    self._await_room()
                elif self._copier.is_closed:  # no update follows
                    return None
                else:
                    self._is_full = True
                    self._changed.notify_all()
                    self._changed.wait()
            else:
                return self._made.get(part)
        made: HostCopy | Exception
        try:
            made = self._copier.copy_part(value, self._since, room_bytes)
        except Exception as error:  # for example, out of memory
            made = error
        with self._changed:
            self._begun.discard(part)
            self._made[part] = made
            self._changed.notify_all()
        if self._released.is_set():
            self._give_back()
        return made

    def _is_settled(self, part: Part) -> bool:
        """Whether the copy of a part is made, or will never be needed."""
        is_needed = part in self._to_copy and part not in self._read
        return part in self._made or self._released.is_set() or not is_needed

    @property
    def _room_bytes(self) -> int | None:
        """Bytes that the limit leaves for more copies; None without a limit."""
        return None if self._limit_bytes is None else self._limit_bytes - self._held_bytes

    def _has_room(self, size_bytes: int) -> bool:
        return self._room_bytes is None or size_bytes <= self._room_bytes

    def _await_room(self) -> None:
        """Let an update wait for the reader; log a long wait. The caller holds the lock."""
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
        waited_s = now - self._waits_since
        step, limit = self.steps_done, format_bytes(self._limit_bytes or 0)
        if waited_s >= self._patience_s:
            logger.warning(
                "the update after step %d has waited %.0f s for free space: copies now go beyond "
                "%s, because other ranks would time out",
                *(step, waited_s, limit),
            )
            self._limit_bytes, self._is_full = None, False
            return
        if waited_s >= TOLD_S and not self._is_told:
            self._is_told = True
            logger.warning(
                "the update after step %d waits until more of its checkpoint is written: copies of "
                "states may take %s (trainer.checkpoint.copy_bytes)",
                *(step, limit),
            )
        self._changed.wait(min(TOLD_S, self._patience_s - waited_s))

    def copy_all(self) -> None:
        """Make all missing copies; return when they are complete."""
        for part in self._to_copy:
            self.copy(part, for_update=False)
        with self._changed:
            made = list(self._made.values())
        for copy in made:
            if isinstance(copy, HostCopy):
                copy.wait()

    def copy_on_thread(self) -> None:
        """Let the copying thread make all copies."""
        if self._to_copy:
            self._is_awaited = True
            self._copier.begin(self)

    def leave_to_reader(self) -> None:
        """Note that the copying thread has finished with this snapshot."""
        with self._changed:
            self._is_awaited = False
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake the waiting threads, to check their conditions again."""
        with self._changed:
            self._changed.notify_all()

    @property
    def _in_order(self) -> list[tuple[Part, StateSlice]]:
        found = [
            ((rank, name), one)
            for rank, name, bounds in self._layout.owned_in_order
            for one in self._layout.slices_of(name, bounds, self._tied_dtypes)
        ]
        return sorted(found, key=lambda entry: -itemsize(entry[1].dtype))

    def slices(self) -> Sequence[StateSlice]:
        """See `Snapshot.slices`."""
        return [one for _, one in self._in_order]

    def pieces(self) -> Iterator[StatePiece]:
        """See `Snapshot.pieces`."""
        for part, entries in groupby(self._in_order, key=lambda entry: entry[0]):
            value = self._value(part)
            for _, one in entries:
                yield one.with_value(value)
            del value  # else its memory would not be freed
            if self._is_limited:
                self._let_go(part)

    def _value(self, part: Part) -> Tensor | Number:
        """Return a part with its value at the time of the snapshot; wait until it is copied.

        Raises:
            RunError: see `Snapshot.pieces`.
        """
        with self._changed:
            self._await_thread(part)
            while part in self._begun:
                self._changed.wait()
            if part in self._read:
                raise RunError("the snapshot was read", todo="take one without a limit")
            values = self._values
            if self._is_limited and not self._is_settled(part):
                self._read_in_place = part
                return self._layout.owned_part(part, values[part[0]][part[1]])
        copy = self.copy(part)
        if self._released.is_set():
            raise RunError("the snapshot was released", todo="read it before")
        if isinstance(copy, Exception):
            raise RunError(
                f"the snapshot after step {self.steps_done} has no copy of {part[1]!r}: {copy}",
                where=f"rank {part[0]}",
                todo="wait until the states are saved, which needs no copies: "
                "trainer.checkpoint.wait=true, step.save(folder), session.pieces()",
            ) from copy
        if copy is None:
            return self._layout.owned_part(part, values[part[0]][part[1]])
        return copy.wait()

    def _await_thread(self, part: Part) -> None:
        """Wait for the copying thread: a second one would take time from threads that compute."""
        while self._is_awaited and not self._is_full and not self._is_settled(part):
            self._changed.wait()

    def _let_go(self, part: Part) -> None:
        """Free the copy of a part that was read."""
        with self._changed:
            copy = self._made.pop(part, None)
            if isinstance(copy, HostCopy):
                self._held_bytes -= copy.value.nbytes
                self._copier.keep([copy.value])
            self._read.add(part)
            self._read_in_place, self._is_full = None, False
            self._changed.notify_all()

    @property
    def is_released(self) -> bool:
        """Whether the reader has released the snapshot."""
        return self._released.is_set()

    def release(self) -> None:
        """See `Snapshot.release`."""
        self._released.set()
        self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            made, self._made, self._values = self._made, {}, {}
            self._changed.notify_all()
        self._copier.keep([copy.value for copy in made.values() if isinstance(copy, HostCopy)])


class Copier:
    """Copies states for snapshots before updates overwrite them, and reuses the memory of copies.

    Args:
        device: The device of the states.
    """

    def __init__(self, device: RankDevice) -> None:
        self.device = device
        self.is_closed = False
        self._lock = threading.Lock()
        #: Snapshots with parts that may not be copied yet.
        self._under_way: list[StateSnapshot] = []
        self._orders: SimpleQueue[StateSnapshot | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Size in bytes -> memory of copies that are no longer needed.
        self._buffers: dict[int, list[Tensor]] = {}
        self._kept_bytes = 0

    def begin(self, snapshot: StateSnapshot) -> None:
        """Let the thread copy a snapshot; the first call starts the thread."""
        if self._thread is None:
            # The thread stays for later snapshots, because a start of a thread waits until it runs.
            thread = threading.Thread(target=self._run, name="sbp snapshot", daemon=True)
            thread.start()
            self._thread = thread
        with self._lock:
            self._under_way.append(snapshot)
        self._orders.put(snapshot)

    def before_overwrite(self, rank: int) -> Callable[[str], None] | None:
        """Return a function to call in the next step before a state is overwritten; or None.

        The function takes the name of the state, and returns when all snapshots have their copy.
        """
        with self._lock:
            snapshots = tuple(self._under_way)
        if not snapshots:
            return None

        def copy_before(name: str) -> None:
            for snapshot in snapshots:
                if isinstance(copy := snapshot.copy((rank, name)), HostCopy):
                    self.device.follow(copy)

        return copy_before

    def copy_part(self, value: Tensor, since: object, room_bytes: int | None) -> HostCopy:
        """Return a copy of a part of a state, in memory of an earlier copy or new memory.

        Args:
            value: The part.
            since: See `RankDevice.copy_aside`.
            room_bytes: Largest size of the memory that stays reserved for later copies; None for
                no limit.
        """
        with self._lock:
            fitting = self._buffers.get(value.nbytes)
            buffer = None
            if fitting:
                buffer = fitting.pop().view(value.dtype).view(value.shape)
                self._kept_bytes -= value.nbytes
            while room_bytes is not None and self._kept_bytes > max(0, room_bytes):
                size_bytes, others = next(iter(self._buffers.items()))
                if others:
                    others.pop()
                    self._kept_bytes -= size_bytes
                else:
                    del self._buffers[size_bytes]
        return self.device.copy_aside(value, since, buffer)

    def keep(self, values: Sequence[Tensor]) -> None:
        """Keep the memory of copies that are no longer needed, for later copies."""
        with self._lock:
            for value in () if self.is_closed else values:
                buffer = value.reshape(-1).view(torch.uint8)
                self._buffers.setdefault(buffer.nbytes, []).append(buffer)
                self._kept_bytes += buffer.nbytes

    def close(self) -> None:
        """Wait until all copies are made; free the memory that is kept.

        A snapshot with a limit makes no copies without room, because no update follows.
        """
        with self._lock:
            self.is_closed, self._buffers, self._kept_bytes = True, {}, 0
            under_way = tuple(self._under_way)
        for snapshot in under_way:
            snapshot.wake()
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        self.device.enter()
        while self._copy_next():
            pass

    def _copy_next(self) -> bool:
        """Copy the next snapshot, or return False at the end."""
        # A separate function, so that the reference to the snapshot ends before the next one comes.
        snapshot = self._orders.get()
        if snapshot is None:
            return False
        # Copy with one intra-op thread, because other threads compute. Reset the number, because
        # threads that start later take the number that was set last.
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            snapshot.copy_all()
        finally:
            torch.set_num_threads(before)
            snapshot.leave_to_reader()
            with self._lock:
                self._under_way.remove(snapshot)
        return True
