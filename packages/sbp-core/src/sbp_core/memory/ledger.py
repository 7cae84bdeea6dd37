"""Bookkeeping of one rank's storages during a replayed step: making, holders, freeing, purposes.

`storages` uses it. A compute segment whose arguments have the same memory layout as in an earlier
firing makes and frees the same storages. So a firing is recorded in its own ledger, and repeated:

    storage     content              from   to          ticks count from the one before the firing
    0           an argument          -      2           dropped, if nobody else holds it
    1           an argument          -      -           held on by a result of the segment
    2           made and dropped     1      2
    3           made                 2      -           handed on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sbp_core.memory.memory_kinds import MemoryKind
from sbp_core.memory.storage_view import StorageView, StridedLayout, Value


@dataclass(slots=True)
class Buffer:
    """One storage of a rank during a step.

    Args:
        name: The key that it was made for.
        module: The path of the module that it belongs to.
        size_bytes: The size of the whole storage.
        start, end: The first and last tick at which it is alive, both included.
        kind: Its purpose.
        on_host: Whether it is in host memory, and not in device memory.
    """

    name: str
    module: str
    size_bytes: int
    start: int
    kind: MemoryKind
    end: int = -1
    on_host: bool = False


#: Layout of the arguments of a firing: key, layout, index of the storage among the arguments', and
#: its bytes; of a host number key, type and value. A flat tuple, because it is compared often.
Arguments = tuple[object, ...]


def arguments_of(taken: Mapping[str, Value]) -> tuple[Arguments, list[int]]:
    """Return the layout of the arguments of a firing, and their storages, each once."""
    numbers: dict[int, int] = {}
    lies: list[object] = []
    for key, value in taken.items():
        if isinstance(value, StorageView):
            number = numbers.setdefault(value.storage, len(numbers))
            lies += (key, value.layout, number, value.storage_bytes)
        else:
            lies += (key, type(value), value)
    return tuple(lies), list(numbers)


@dataclass(frozen=True, slots=True)
class RecordedFiring:
    """The effect of one firing of a segment; storages are numbered from those of its arguments on.

    Args:
        arguments: The layout of its arguments.
        nodes: The node of each of its ticks.
        outer: For each storage of its arguments: the change of its number of holders; the tick at
            which the last holder in the firing drops it, or -1; and its kind, if found.
        inner: For each storage that it makes: the buffer, its holders at the end, and whether its
            kind is settled.
        made: Its results by key.
    """

    arguments: Arguments
    nodes: tuple[str, ...]
    outer: tuple[tuple[int, int, MemoryKind | None], ...]
    inner: tuple[tuple[Buffer, int, bool], ...]
    made: tuple[tuple[str, Value], ...]


class Ledger:
    """The storages of one rank and their holders. `tick` advances the time.

    Args:
        kinds: The kinds that follow from the key alone. For other keys, the lifetime decides
            between temporaries and activations.
    """

    def __init__(self, kinds: Mapping[str, MemoryKind]) -> None:
        self.kinds = kinds
        self.now = 0
        self.buffers: list[Buffer] = []
        self._holders: list[int] = []
        self._settled: list[bool] = []

    def tick(self) -> None:
        """Advance the time by one instruction."""
        self.now += 1

    def new(
        self,
        name: str,
        layout: StridedLayout,
        size_bytes: int,
        *,
        kind: MemoryKind | None = None,
        module: str = "",
        on_host: bool = False,
    ) -> StorageView:
        """Make a storage without holders, and return the tensor in it."""
        made = Buffer(name, module, size_bytes, self.now, kind or MemoryKind.TEMPORARIES)
        made.on_host = on_host
        self.buffers.append(made)
        self._holders.append(0)
        self._settled.append(kind is not None)
        return StorageView(layout, len(self.buffers) - 1, size_bytes)

    def name(self, key: str, value: object) -> None:
        """Set the kind of a value's storage, if it follows from the key."""
        kind = self.kinds.get(key)
        if kind is not None and isinstance(value, StorageView) and not self._settled[value.storage]:
            self.buffers[value.storage].kind = kind
            self._settled[value.storage] = True

    def hold(self, value: object) -> None:
        """Count one more holder."""
        if isinstance(value, StorageView):
            self._holders[value.storage] += 1

    def drop(self, value: object) -> None:
        """Count one holder less; the last one ends the storage."""
        if isinstance(value, StorageView):
            self._holders[value.storage] -= 1
            if not self._holders[value.storage]:
                self.buffers[value.storage].end = self.now

    def finish(self) -> None:
        """End all storages that are still held.

        A storage that no firing passed on to another has stayed a temporary. A storage of the batch
        gets its kind when it is made (`new`, `name`), so an unsettled one is our own bug.
        """
        for index, buffer in enumerate(self.buffers):
            if buffer.end < 0:
                buffer.end = self.now
            assert self._settled[index] or buffer.kind is not MemoryKind.BATCH, buffer.name

    def crosses(self, value: object) -> None:
        """Note that a value is passed from one firing to another."""
        if isinstance(value, StorageView) and not self._settled[value.storage]:
            self.buffers[value.storage].kind = MemoryKind.ACTIVATIONS

    # Segments.

    def begin(self, taken: Mapping[str, Value]) -> tuple[Ledger, dict[str, Value]]:
        """Return a ledger for one firing, and the arguments of the firing, held there."""
        ledger, own, values = Ledger(self.kinds), dict[int, StorageView](), dict[str, Value]()
        for key, value in taken.items():
            values[key] = value
            if isinstance(value, StorageView):
                if value.storage not in own:
                    own[value.storage] = ledger.new("", value.layout, value.storage_bytes)
                storage = own[value.storage].storage
                values[key] = StorageView(value.layout, storage, value.storage_bytes)
                ledger.hold(values[key])
        return ledger, values

    def recorded(
        self, taken: Mapping[str, Value], nodes: Iterable[str], made: Mapping[str, Value]
    ) -> RecordedFiring:
        """Return the effect of a firing on this ledger, which began for it.

        Args:
            taken: Its arguments, as they were given to `begin`.
            nodes: The node of each of its ticks.
            made: Its results, held.
        """
        arguments, storages = arguments_of(taken)
        held = Counter(v.storage for v in taken.values() if isinstance(v, StorageView))
        settled = zip(self.buffers, self._holders, self._settled, strict=True)
        return RecordedFiring(
            arguments=arguments,
            nodes=tuple(nodes),
            outer=tuple(
                (holders - held[storage], buffer.end, buffer.kind if is_settled else None)
                for storage, (buffer, holders, is_settled) in zip(storages, settled, strict=False)
            ),
            inner=tuple(settled),
            made=tuple(made.items()),
        )

    def repeat(self, done: RecordedFiring, storages: Sequence[int]) -> dict[str, Value]:
        """Repeat the effect of an earlier firing; return its results.

        Args:
            done: A firing whose arguments had the same layout.
            storages: The present storages of the arguments.
        """
        start, first = self.now, len(self.buffers) - len(storages)
        for storage, (more, dropped, kind) in zip(storages, done.outer, strict=True):
            self._holders[storage] += more
            if not self._holders[storage]:
                self.buffers[storage].end = start + dropped
            if kind is not None and not self._settled[storage]:
                self.buffers[storage].kind = kind
                self._settled[storage] = True
        for one, holders, is_settled in done.inner:
            end = start + one.end if one.end >= 0 else -1
            begins = start + one.start
            self.buffers.append(
                Buffer(one.name, one.module, one.size_bytes, begins, one.kind, end, one.on_host)
            )
            self._holders.append(holders)
            self._settled.append(is_settled)
        self.now = start + len(done.nodes)
        made: dict[str, Value] = {}
        for key, value in done.made:
            if isinstance(value, StorageView):
                number = value.storage
                storage = storages[number] if number < len(storages) else first + number
                value = StorageView(value.layout, storage, value.storage_bytes)
            made[key] = value
        return made
