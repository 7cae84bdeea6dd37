"""The storages of one rank during a step: made, held, dropped, and what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp_core.memory.kinds import MemoryKind
from sbp_core.memory.storage_view import StorageView, StridedLayout


@dataclass(slots=True)
class Buffer:
    """One storage of a rank during a step.

    Args:
        name: The key that it was made for.
        module: Path of the module that it belongs to.
        size_bytes: Of the whole storage.
        start, end: First and last tick at which it is alive, both included.
        kind: What it is for.
    """

    name: str
    module: str
    size_bytes: int
    start: int
    kind: MemoryKind
    end: int = -1


class Ledger:
    """Who holds which storage of a rank. Time goes on by `tick`.

    Args:
        kinds: Kinds that are known from the key alone. Of other keys, the lifetime decides between
            temporaries and activations.
    """

    def __init__(self, kinds: Mapping[str, MemoryKind]) -> None:
        self.kinds = kinds
        self.now = 0
        self.buffers: list[Buffer] = []
        self._holders: list[int] = []
        self._settled: list[bool] = []

    def tick(self) -> None:
        """Go on by one instruction."""
        self.now += 1

    def new(
        self,
        name: str,
        layout: StridedLayout,
        size_bytes: int,
        *,
        kind: MemoryKind | None = None,
        module: str = "",
    ) -> StorageView:
        """Make a storage, held by nobody yet, and return the tensor that lies in it."""
        self.buffers.append(
            Buffer(name, module, size_bytes, self.now, kind or MemoryKind.TEMPORARIES)
        )
        self._holders.append(0)
        self._settled.append(kind is not None)
        return StorageView(layout, len(self.buffers) - 1, size_bytes)

    def name(self, key: str, value: object) -> None:
        """Note what a storage is for, if a key that lies in it says so."""
        kind = self.kinds.get(key)
        if kind is not None and isinstance(value, StorageView) and not self._settled[value.storage]:
            self.buffers[value.storage].kind = kind
            self._settled[value.storage] = True

    def hold(self, value: object) -> None:
        """Note one more holder."""
        if isinstance(value, StorageView):
            self._holders[value.storage] += 1

    def drop(self, value: object) -> None:
        """Note one holder less; the last one ends the storage."""
        if isinstance(value, StorageView):
            self._holders[value.storage] -= 1
            if not self._holders[value.storage]:
                self.buffers[value.storage].end = self.now

    def finish(self) -> None:
        """End what is still held.

        What has crossed no firing has stayed a temporary. A storage of the batch is named when it
        is made (`new`, `name`), so one that is not settled cannot be of it: our own bug.
        """
        for index, buffer in enumerate(self.buffers):
            if buffer.end < 0:
                buffer.end = self.now
            assert self._settled[index] or buffer.kind is not MemoryKind.BATCH, buffer.name

    def crosses(self, value: object) -> None:
        """Note that a value goes from one firing to another."""
        if isinstance(value, StorageView) and not self._settled[value.storage]:
            self.buffers[value.storage].kind = MemoryKind.ACTIVATIONS
