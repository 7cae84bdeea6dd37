"""Record of a model constructor as a tape of operators, and its replay to create the tensors.

`record` writes the tape (`Tape`), `deferred_model` replays it (`TapeReplay`) to create states.

A tensor is a window on a storage: storage, size, stride and offset. So views need no entry. An
entry is an operator that creates storages or writes to them.

    w = torch.empty(2, 3)        no entry: its values are arbitrary
    w.uniform_(-1, 1)            entry 0  uniform_   covers 0            event 0
    w[0].mul_(2)                 entry 1  mul_       writes 0, reads 0
    b = w.sum(1)                 entry 2  sum        makes 1, reads 0

Events are uses of PyTorch's default generator, in order: a draw, or a state that the constructor
set. Position `n` is the moment before event `n`.

To create tensors, the entries that they depend on are executed. Every draw starts from the state
that the generator had at this position in the constructor, so the numbers are equal to those of one
device, bit for bit. If a draw belongs to another tensor, its numbers go to scratch memory, which is
freed at once; it has to run, because only the operator knows how far it moves the generator. The
generator is restored after each draw.

    events           0 (a)    1 (b)    2 (b)    3 (a)
    create b         scratch  b        b
    create a         a                          a        state 3 is known by now
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sbp_torch._torch_compat import copied_storage, new_storage, storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A tensor as a part of a storage.

    Args:
        storage: Number of the storage on the tape.
        dtype: The dtype of the elements.
        size: Extent of each dim.
        stride: Stride of each dim, in elements.
        offset: Offset of the first element, in elements.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor on a storage with values."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


class OwnGenerator:
    """Stands for a `torch.Generator` of the user in the arguments of an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeEntry:
    """One executed operator.

    Args:
        op: An operator, or a function that fills its first argument with random numbers.
        args: Arguments, with a `Window` for every tensor.
        kwargs: Keyword arguments, with a `Window` for every tensor.
        made: For every tensor among the results its window, if its storage is new; else None.
        reads: Storages whose values the operator uses.
        writes: Storages that the operator changes or creates.
        covers: Storages among `writes` that the operator overwrites completely.
        default: The default dtype at that time.
        event: Number of the draw from the default generator; None if there is none.
        generator: State of a user's generator before the operator draws from it.
    """

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: tuple[Window | None, ...] = ()
    reads: frozenset[int]
    writes: frozenset[int]
    covers: frozenset[int]
    default: torch.dtype
    event: int | None = None
    generator: Tensor | None = None

    @property
    def touches(self) -> frozenset[int]:
        """All storages of the entry."""
        return self.reads | self.writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """An event: the generator is set back to its state at a position."""

    position: int


#: An event: number of an entry that draws, a state that is set, or return to an earlier state.
Event = int | Tensor | Return


@dataclass(slots=True, kw_only=True)
class Tape:
    """The entries, events and storages of a constructor."""

    seed: int
    entries: list[TapeEntry] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    #: Number of a storage -> its size in bytes.
    sizes: list[int] = field(default_factory=list)
    #: Number of a storage -> storage with values from outside of the tape.
    constants: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    #: Number of a storage -> entries that write to it, in order.
    writers: dict[int, list[int]] = field(default_factory=dict)
    #: Key -> number, and the storage without data, which is kept alive so that keys stay unique.
    _numbers: dict[int, tuple[int, torch.UntypedStorage]] = field(default_factory=dict)

    def append(self, entry: TapeEntry) -> None:
        """Add an entry."""
        if entry.event is not None:
            assert entry.event == len(self.events), "a draw is the next event"
            self.events.append(len(self.entries))
        for storage in entry.writes:
            self.writers.setdefault(storage, []).append(len(self.entries))
        self.entries.append(entry)

    def window(self, tensor: Tensor) -> Window:
        """Return the window of a tensor without data; a new storage gets a number."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._numbers:
            self._numbers[key] = (len(self.sizes), storage)
            self.sizes.append(0)
        number = self._numbers[key][0]
        self.sizes[number] = max(self.sizes[number], storage.nbytes())
        return Window(
            storage=number,
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def is_whole(self, window: Window) -> bool:
        """Whether a window covers every element of its storage once."""
        numel = torch.Size(window.size).numel()
        if numel * window.dtype.itemsize != self.sizes[window.storage]:
            return False
        # No two elements share memory, and there are no gaps.
        expected = 1
        for stride, size in sorted(zip(window.stride, window.size, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def needed_for(self, storages: Collection[int], end: int | None = None) -> list[int]:
        """Return the entries before `end` on which the values of storages depend, in order.

        It is a liveness analysis, as in dead code elimination. It walks backwards over the entries
        with the set of live storages. An entry that writes to a live storage is needed. Before it,
        the storages that it reads are live, and those that it covers are not.
        """
        live, found = set(storages), list[int]()
        # The last write to each live storage, latest first; all other entries are skipped.
        waiting = [-number for storage in live for number in self._last_write(storage, end)]
        heapify(waiting)
        while waiting:
            number = -heappop(waiting)
            entry = self.entries[number]
            if found[-1:] == [number]:  # it writes to two live storages
                continue
            found.append(number)
            live = (live - entry.covers) | entry.reads
            for storage in entry.touches & live:
                for earlier in self._last_write(storage, number):
                    heappush(waiting, -earlier)
        return found[::-1]

    def _last_write(self, storage: int, end: int | None) -> list[int]:
        """Return the last entry before `end` that writes to a storage, if there is one."""
        writers = self.writers.get(storage, [])
        at = len(writers) if end is None else bisect_left(writers, end)
        return writers[at - 1 : at] if at else []


#: Storages that have values now, by number.
Storages = dict[int, torch.UntypedStorage]


class TapeReplay:
    """Executes entries of a tape to create tensors, and records the states of the generator."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        #: The generator's state before each event, up to the first event not yet passed: about
        #: 5 KB each, so that the replay never restarts at the beginning.
        self.states = [torch.Generator().manual_seed(tape.seed).get_state()]

    def draws(self, window: Window) -> list[int]:
        """Return the events at which numbers are drawn for a tensor, in order."""
        entries = (self.tape.entries[number] for number in self.tape.needed_for({window.storage}))
        return [entry.event for entry in entries if entry.event is not None]

    def values(self, windows: Sequence[Window], end: int | None = None) -> list[Tensor]:
        """Return tensors with their values before entry `end`; None: at the end of the tape.

        Intermediate values are freed after their last use.
        """
        wanted = {window.storage for window in windows}
        entries = [self.tape.entries[number] for number in self.tape.needed_for(wanted, end)]
        events = [entry.event for entry in entries if entry.event is not None]
        if events:
            # Draw for other tensors first: their scratch memory is freed before ours is made.
            consecutive = events[-1] - events[0] < len(events)
            self._advance(events[0] if consecutive else events[-1])
        last = {storage: at for at, entry in enumerate(entries) for storage in entry.touches}
        storages: Storages = {}
        for at, entry in enumerate(entries):
            if entry.event is None:
                self._run(entry, storages)
            else:
                self._draw(entry, entry.event, storages)
            for storage in entry.touches - wanted:
                if last[storage] == at:
                    storages.pop(storage, None)
        return [self._tensor(window, storages) for window in windows]

    def _draw(self, entry: TapeEntry, event: int, storages: Storages) -> None:
        """Run an entry with the generator's state at its event."""
        self._advance(event)
        with torch.random.fork_rng(devices=()):
            torch.default_generator.set_state(self.states[event])
            self._run(entry, storages)
            if event == len(self.states) - 1:
                self.states.append(torch.default_generator.get_state())

    def _advance(self, position: int) -> None:
        """Run the events before a position; their draws go to scratch memory."""
        while len(self.states) <= position:
            event = self.tape.events[len(self.states) - 1]
            if isinstance(event, Return):
                self.states.append(self.states[event.position])
            elif isinstance(event, Tensor):
                self.states.append(event)
            else:
                number, scratch = event, Storages()
                entry = self.tape.entries[number]
                if entry.reads:  # their values may affect how far it moves the generator
                    given = tree_leaves((entry.args, entry.kwargs))
                    windows = [value for value in given if isinstance(value, Window)]
                    for window, value in zip(windows, self.values(windows, number), strict=True):
                        scratch[window.storage] = value.untyped_storage()
                self._draw(entry, len(self.states) - 1, scratch)

    def _run(self, entry: TapeEntry, storages: Storages) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, Window):
                return self._tensor(value, storages)
            if isinstance(value, OwnGenerator):
                assert entry.generator is not None, "recorded with it"
                own = torch.Generator()
                own.set_state(entry.generator)
                return own
            return value

        args, kwargs = tree_map(real, entry.args), tree_map(real, dict(entry.kwargs))
        before = torch.get_default_dtype()
        torch.set_default_dtype(entry.default)
        try:
            with torch.no_grad():
                results = entry.op(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)
        made = [value for value in tree_leaves(results) if isinstance(value, Tensor)]
        for window, value in zip(entry.made, made, strict=bool(entry.made)):
            if window is None:
                continue
            storage, size_bytes = value.untyped_storage(), self.tape.sizes[window.storage]
            alike = (value.stride(), value.storage_offset()) == (window.stride, window.offset)
            if not alike or storage.nbytes() < size_bytes:  # copy to the layout on the tape
                storage = new_storage(size_bytes)
                window.on(storage).copy_(value)
            storages[window.storage] = storage

    def _tensor(self, window: Window, storages: Storages) -> Tensor:
        number = window.storage
        if number not in storages:
            constant = self.tape.constants.get(number)
            if constant is None:
                # Created by `torch.empty`: the program does not rely on its values.
                storages[number] = new_storage(self.tape.sizes[number])
            else:
                changes = number in self.tape.writers
                storages[number] = copied_storage(constant) if changes else constant
        return window.on(storages[number])
