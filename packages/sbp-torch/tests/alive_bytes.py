"""Count the bytes of storages that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):
    """Counts every storage on the CPU that an operator of the block is given or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, made)):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._note(value.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        # The Python object of a storage lives as long as the storage does.
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
