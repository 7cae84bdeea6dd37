"""Count the bytes of storages that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_torch._torch_compat import OpOverload
from sbp_torch.ops.operator_calls import OperatorCalls


class AliveBytes(OperatorCalls):
    """Counts every storage on the CPU that an operator of the block is given or makes."""

    def __init__(self) -> None:
        super().__init__(self._note_call)
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def _note_call(self, op: OpOverload, inputs: Sequence[Any], results: Sequence[Any]) -> None:
        for value in (*inputs, *results):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._note(value.untyped_storage())

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
