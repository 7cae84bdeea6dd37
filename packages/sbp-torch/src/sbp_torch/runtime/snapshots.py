"""Snapshots: states as they were between two steps, copied aside while the next step computes.

One thread copies what the next update overwrites, in the order in which it does. An update that
needs a copy which is not there yet makes it, or waits for the thread if that is in the middle.

    snapshot            |
    rank            ... | forward  backward  commit | update a  update b  copy c, update c
    copying thread      |  copy a  . . .  copy b  . . . . . . .   copy d

Nothing is copied of states that no update overwrites: new values take their place in other memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sbp_core.compile import Compute, PhysicalPlan, first_overwrites
from sbp_core.errors import RunError
from sbp_core.runtime import Snapshot, StatePiece
from sbp_torch.runtime.devices import Aside, RankDevice

if TYPE_CHECKING:
    from sbp_torch.runtime.store import StateStore

#: A part of a state: of which rank, and by which name ranks know it.
Part = tuple[int, str]


class StateSnapshot(Snapshot):
    """What the local ranks own of the states in a store.

    Args:
        store: The states, which are whole.
        steps_done: Of the session.
    """

    def __init__(self, store: StateStore, steps_done: int) -> None:
        self.steps_done = steps_done
        self._store, self._copier = store, store.copier
        # A store replaces these and changes none.
        self._values, self._tied_dtypes = store.values, store.tied_dtypes
        self._since = store.device.now()
        self._to_copy: Mapping[Part, None] = {} if self._copier.is_closed else store.overwritten
        self._changed = threading.Condition()
        self._begun: set[Part] = set()
        self._made: dict[Part, Aside | Exception] = {}
        self._released = threading.Event()
        #: Whether the copying thread will come to it, or is at it.
        self._is_awaited = False

    def copy(self, part: Part) -> Aside | Exception | None:
        """Return the copy of a part, or why there is none; make it unless somebody does.

        None of a part that is not copied, or when the snapshot is released.
        """
        with self._changed:
            while part in self._begun:
                self._changed.wait()
            if part in self._made or self._released.is_set() or part not in self._to_copy:
                return self._made.get(part)
            self._begun.add(part)
            value = self._store.owned_part(part, self._values[part[0]][part[1]])
        assert isinstance(value, Tensor), "host numbers are not overwritten"
        made: Aside | Exception
        try:
            made = self._copier.copied(part, value, self._since)
        except Exception as error:  # such as for lack of memory
            made = error
        with self._changed:
            self._begun.discard(part)
            self._made[part] = made
            self._changed.notify_all()
        if self._released.is_set():
            self._give_back()
        return made

    def copy_all(self) -> None:
        """Make all copies that nobody has made; return when they are there."""
        made = [self.copy(part) for part in self._to_copy]
        for copy in made:
            if isinstance(copy, Aside):
                copy.wait()

    def copy_on_thread(self) -> None:
        """Have the copying thread make all copies."""
        if self._to_copy:
            self._is_awaited = True
            self._copier.begin(self)

    def leave_to_reader(self) -> None:
        """Note that the copying thread is through with it."""
        with self._changed:
            self._is_awaited = False
            self._changed.notify_all()

    def pieces(self) -> Iterator[StatePiece]:
        """See `Snapshot.pieces`."""
        values = self._values
        for rank, name, bounds in self._store.owned_in_order:
            self._await((rank, name))
            copy = self.copy((rank, name))
            if self._released.is_set():
                raise RunError("the snapshot was released", todo="read it before")
            if isinstance(copy, Exception):
                raise RunError(
                    f"the snapshot after step {self.steps_done} has no copy of {name!r}: {copy}",
                    where=f"rank {rank}",
                    todo="wait for what is saved, which copies nothing: "
                    "trainer.checkpoint.wait=true, step.save(folder), session.pieces()",
                ) from copy
            if copy is None:
                value = self._store.owned_part((rank, name), values[rank][name])
            else:
                value = copy.wait()
            yield from self._store.pieces_of(name, bounds, value, self._tied_dtypes)

    def _await(self, part: Part) -> None:
        """Wait for the thread to copy a part: two would take more from those that compute."""
        with self._changed:
            while self._is_awaited and part in self._to_copy and part not in self._made:
                self._changed.wait()

    def release(self) -> None:
        """See `Snapshot.release`."""
        self._released.set()
        self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            made, self._made, self._values = self._made, {}, {}
        self._copier.keep({p: copy.value for p, copy in made.items() if isinstance(copy, Aside)})


class Copier:
    """Copies aside what updates overwrite, and keeps the memory for the next time.

    Args:
        plan: Of the session whose updates these are.
        device: Of the states.
    """

    def __init__(self, plan: PhysicalPlan, device: RankDevice) -> None:
        self.plan, self.device = plan, device
        self.is_closed = False
        self._lock = threading.Lock()
        #: Those of which a part may not be copied yet.
        self._under_way: list[StateSnapshot] = []
        self._orders: SimpleQueue[StateSnapshot | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._buffers: dict[Part, Tensor] = {}

    @cached_property
    def places(self) -> Mapping[Part, tuple[int, int]]:
        """When an update overwrites a part of a state: its firing, and the instruction in it."""
        found: dict[Part, tuple[int, int]] = {}
        for part in self.plan.ranks:
            for order in part.orders.values():
                for place, (name, _) in enumerate(order):
                    actor = part.by_name[name]
                    firsts = first_overwrites(actor) if isinstance(actor, Compute) else {}
                    inside = {state: at for at, states in firsts.items() for state in states}
                    for state in actor.in_place:
                        found[part.rank, state] = (place, inside.get(state, len(inside)))
        return found

    def begin(self, snapshot: StateSnapshot) -> None:
        """Have the thread copy a snapshot; the first one starts it."""
        if self._thread is None:
            # It stays: who starts a thread waits until it runs.
            thread = threading.Thread(target=self._run, name="sbp snapshot", daemon=True)
            thread.start()
            self._thread = thread
        with self._lock:
            self._under_way.append(snapshot)
        self._orders.put(snapshot)

    def before_overwrite(self, rank: int) -> Callable[[str], None] | None:
        """Return what a rank calls in its next step before it overwrites a state; None if nothing.

        It returns when the state is copied into all snapshots that need it.
        """
        with self._lock:
            snapshots = tuple(self._under_way)
        if not snapshots:
            return None

        def copy_before(name: str) -> None:
            for snapshot in snapshots:
                if isinstance(copy := snapshot.copy((rank, name)), Aside):
                    self.device.follow(copy)

        return copy_before

    def copied(self, part: Part, value: Tensor, since: object) -> Aside:
        """Return a copy of a part of a state, in memory that is kept for it or new."""
        with self._lock:
            buffer = self._buffers.pop(part, None)
        return self.device.copy_aside(value, since, buffer)

    def keep(self, buffers: Mapping[Part, Tensor]) -> None:
        """Keep the memory of copies that nobody needs any more, one of each part."""
        with self._lock:
            if not self.is_closed:
                self._buffers |= buffers

    def close(self) -> None:
        """Wait until all copies are made; let go of the memory."""
        with self._lock:
            self.is_closed, self._buffers = True, {}
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
        # A frame of its own lets go of the snapshot, whose memory must not wait for the next.
        snapshot = self._orders.get()
        if snapshot is None:
            return False
        # One thread, beside those that compute; threads of the process that begin later take the
        # count that was set last.
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
