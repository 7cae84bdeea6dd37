"""The storages of one rank during a step: made, held, dropped, and what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sbp_core.memory.kinds import Kind
from sbp_core.memory.storage_view import StorageView, Strided


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
    kind: Kind
    end: int = -1


class Ledger:
    """Who holds which storage of a rank. Time goes on by `tick`.

    Args:
        kinds: Of the keys for which it is no matter of lifetime.
    """

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
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
        lies: Strided,
        size_bytes: int,
        *,
        kind: Kind | None = None,
        module: str = "",
    ) -> StorageView:
        """Make a storage, held by nobody yet, and return the tensor that lies in it."""
        self.buffers.append(Buffer(name, module, size_bytes, self.now, kind or Kind.TEMPORARIES))
        self._holders.append(0)
        self._settled.append(kind is not None)
        return StorageView(lies, len(self.buffers) - 1, size_bytes)

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
        """End what is still held, and call what crossed no firing a temporary."""
        for index, buffer in enumerate(self.buffers):
            if buffer.end < 0:
                buffer.end = self.now
            assert self._settled[index] or buffer.kind is not Kind.BATCH, buffer.name

    def crosses(self, value: object) -> None:
        """Note that a value goes from one firing to another."""
        if isinstance(value, StorageView) and not self._settled[value.storage]:
            self.buffers[value.storage].kind = Kind.ACTIVATIONS
