"""Make the tensors of a tape: run its entries for real, a family at a time.

Every draw starts from the state that the default generator had at its place in the constructor, so
the numbers are those of one device bit for bit. Draws whose result nobody needs are made into
scratch memory that is freed at once: how far an operator moves the generator depends on its shape
and dtype, and only the operator knows. PyTorch's default generator is lent for the time of a draw
and given back as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from sbp_torch._torch_compat import copied_storage, new_storage
from sbp_torch.deferred_init.families import StateFamily, is_interleaved
from sbp_torch.deferred_init.tape import OwnGenerator, Return, Tape, TapeEntry, Window

#: Storages that hold values now, by number.
Held = dict[int, torch.UntypedStorage]


class Replay:
    """The generator of a tape, and the work of making its tensors.

    Args:
        tape: What to make; may grow between calls.
        keep: Positions of the generator to remember as it passes them; None for all.
    """

    def __init__(self, tape: Tape, keep: Collection[int] | None = None) -> None:
        self.tape, self.keep = tape, keep
        self._restart()

    def _restart(self) -> None:
        self.position = 0
        self.state = torch.Generator().manual_seed(self.tape.seed).get_state()
        self.passed: dict[int, Tensor] = {}

    def values(self, windows: Sequence[Window], end: int | None = None) -> list[Tensor]:
        """Return tensors as they are before an entry; at the end of the tape if None."""
        held: Held = {}
        for number in self.tape.needed({window.storage for window in windows}, end):
            self._execute(self.tape.entries[number], held)
        return [self._tensor(window, held) for window in windows]

    def family(self, family: StateFamily) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of a family by name, each as soon as nothing changes it any more.

        Nothing is kept of a state that has been yielded, but what others are made of.
        """
        entries = [self.tape.entries[number] for number in family.entries]
        last = {storage: at for at, entry in enumerate(entries) for storage in entry.touches}
        dying: dict[int, list[int]] = defaultdict(list)
        for storage, at in last.items():
            dying[at].append(storage)
        names: dict[int, list[str]] = defaultdict(list)
        for name, window in family.states.items():
            names[window.storage].append(name)
        self._foresee([entry.event for entry in entries if entry.event is not None])
        held: Held = {}
        for at, entry in enumerate(entries):
            self._execute(entry, held)
            for storage in dying[at]:
                yield from self._give(storage, names.pop(storage, []), family, held)
        for storage, rest in names.items():
            yield from self._give(storage, rest, family, held)

    def _give(
        self, storage: int, names: list[str], family: StateFamily, held: Held
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the states of one storage; forget it with the last."""
        for name in names[:-1]:
            yield name, self._tensor(family.states[name], held)
        if names:
            yield names[-1], self._last(family.states[names[-1]], held)
        held.pop(storage, None)

    def _last(self, window: Window, held: Held) -> Tensor:
        tensor = self._tensor(window, held)
        del held[window.storage]
        return tensor

    def _foresee(self, events: Sequence[int]) -> None:
        """Pass the draws of a family beforehand if those of others lie in between.

        Else scratch memory for theirs would be held beside the family's own.
        """
        if is_interleaved(events):
            self._advance(events[-1])

    def _execute(self, entry: TapeEntry, held: Held) -> None:
        if entry.event is None:
            self._run(entry, held)
            return
        with self._at(entry.event):
            self._run(entry, held)

    def _run(self, entry: TapeEntry, held: Held) -> None:
        def real(value: Any) -> Any:
            if isinstance(value, Window):
                return self._tensor(value, held)
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
                held[window.storage] = _laid_out(value, window, self.tape.sizes[window.storage])

    def _tensor(self, window: Window, held: Held) -> Tensor:
        number = window.storage
        if number not in held:
            constant = self.tape.constants.get(number)
            if constant is None:
                # Made by `torch.empty`: whatever values it has, the program does not rely on them.
                held[number] = new_storage(self.tape.sizes[number])
            else:
                held[number] = copied_storage(constant) if number in self.tape.written else constant
        return window.on(held[number])

    # The generator.

    @contextmanager
    def _at(self, position: int) -> Iterator[None]:
        """Set the default generator to what it was before a draw; note how it is afterwards."""
        if position > self.position:
            self._advance(position)
        if position < self.position and position not in self.passed:
            self._restart()
            self._advance(position)
        if position < self.position:
            with _lent(self.passed[position]):
                yield
            return
        if self._is_kept(position):
            self.passed[position] = self.state
        with _lent(self.state) as lent:
            yield
            self.state = lent.get_state()
            self.position += 1

    def _advance(self, position: int) -> None:
        """Pass events up to a position; draws go to scratch memory."""
        with _lent(self.state) as lent:
            while self.position < position:
                if self._is_kept(self.position):
                    self.passed[self.position] = lent.get_state()
                event = self.tape.events[self.position]
                if isinstance(event, Return):
                    lent.set_state(self.passed[event.position])
                elif isinstance(event, Tensor):
                    lent.set_state(event)
                else:
                    self._skip(event, lent)
                self.position += 1
            self.state = lent.get_state()

    def _skip(self, number: int, lent: torch.Generator) -> None:
        entry = self.tape.entries[number]
        held: Held = {}
        if not entry.is_blind:
            # It has to be given its arguments; the generator must then be as it is now.
            now = lent.get_state()
            windows = [v for v in tree_leaves((entry.args, entry.kwargs)) if isinstance(v, Window)]
            for window, value in zip(windows, self.values(windows, number), strict=True):
                held[window.storage] = value.untyped_storage()
            lent.set_state(now)
        self._run(entry, held)

    def _is_kept(self, position: int) -> bool:
        return self.keep is None or position in self.keep


@contextmanager
def _lent(state: Tensor) -> Iterator[torch.Generator]:
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
