"""Make tensors of a tape: run for real the entries that they depend on.

Every draw starts from the state that the default generator had at its place in the constructor, so
that the numbers are those of one device, bit for bit. Where a draw belongs to somebody else, its
numbers go to scratch memory that is freed at once: how far an operator moves the generator depends
on its shape and dtype, and only the operator knows. PyTorch's default generator is borrowed for the
time of a draw and given back as it was.

    events           0 (a)    1 (b)    2 (b)    3 (a)
    make b           scratch  b        b
    make a           a                          a        state 0 is known by now
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sbp_torch._torch_compat import copied_storage, new_storage
from sbp_torch.deferred_init.tape import OwnGenerator, Return, Tape, TapeEntry, Window

#: Storages that have values now, by number.
Storages = dict[int, torch.UntypedStorage]


class Replay:
    """The default generator along a tape, and the work of making the tape's tensors.

    Args:
        tape: What to make; may grow between calls.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        #: The generator's state before each event, up to the first that has not been passed: some
        #: 5 KB each, so that it never has to start over.
        self.states = [torch.Generator().manual_seed(tape.seed).get_state()]

    def draws(self, window: Window) -> list[int]:
        """Return the events at which numbers are drawn for a tensor, in order."""
        entries = (self.tape.entries[number] for number in self.tape.needed({window.storage}))
        return [entry.event for entry in entries if entry.event is not None]

    def values(self, windows: Sequence[Window], end: int | None = None) -> list[Tensor]:
        """Return tensors as they are before an entry; at the end of the tape if None.

        What others are made of is freed as soon as they are.
        """
        wanted = {window.storage for window in windows}
        entries = [self.tape.entries[number] for number in self.tape.needed(wanted, end)]
        events = [entry.event for entry in entries if entry.event is not None]
        if events:
            # Scratch memory for the draws of others is freed before any of ours is made.
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
        """Run an entry with the generator as it was then."""
        self._advance(event)
        with _borrowed(self.states[event]) as generator:
            self._run(entry, storages)
            if event == len(self.states) - 1:
                self.states.append(generator.get_state())

    def _advance(self, position: int) -> None:
        """Pass the events before a position; their draws go to scratch memory."""
        while len(self.states) <= position:
            event = self.tape.events[len(self.states) - 1]
            if isinstance(event, Return):
                self.states.append(self.states[event.position])
            elif isinstance(event, Tensor):
                self.states.append(event)
            else:
                number, scratch = event, Storages()
                entry = self.tape.entries[number]
                if entry.reads:  # how far it moves the generator may depend on their values
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

        with torch.no_grad(), _default_dtype(entry.default):
            results = entry.op(*tree_map(real, entry.args), **tree_map(real, dict(entry.kwargs)))
        made = [value for value in tree_leaves(results) if isinstance(value, Tensor)]
        for window, value in zip(entry.made, made, strict=bool(entry.made)):
            if window is not None:
                size_bytes = self.tape.sizes[window.storage]
                storages[window.storage] = _laid_out(value, window, size_bytes)

    def _tensor(self, window: Window, storages: Storages) -> Tensor:
        number = window.storage
        if number not in storages:
            constant = self.tape.constants.get(number)
            if constant is None:
                # Made by `torch.empty`: whatever values it has, the program does not rely on them.
                storages[number] = new_storage(self.tape.sizes[number])
            else:
                changes = number in self.tape.writers
                storages[number] = copied_storage(constant) if changes else constant
        return window.on(storages[number])


@contextmanager
def _borrowed(state: Tensor) -> Iterator[torch.Generator]:
    """Set the default generator to a state for a while."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield generator
    finally:
        generator.set_state(before)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _laid_out(value: Tensor, window: Window, size_bytes: int) -> torch.UntypedStorage:
    """Return the storage of a result as the tape describes it; a copy if it lies otherwise."""
    storage = value.untyped_storage()
    alike = (value.stride(), value.storage_offset()) == (window.stride, window.offset)
    if alike and storage.nbytes() >= size_bytes:
        return storage
    fresh = new_storage(size_bytes)
    window.on(fresh).copy_(value)
    return fresh
