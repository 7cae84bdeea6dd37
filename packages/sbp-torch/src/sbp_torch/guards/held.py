"""What a guard keeps of what it compares: attributes, containers, tensors, as they were."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_torch.capture.convert import MAX_CONSTANT
from sbp_torch.guards.connected import OWNER, Connected

#: What `surroundings` returns.
SURROUNDINGS = "the default dtype, and the dtypes of torch.autocast on CPU and CUDA,"

#: Tensors up to so many elements are compared by value, too: writes through `.data` have no trace.
#: Larger ones are no constants of a graph.
_MOST_ELEMENTS = MAX_CONSTANT


@dataclass(frozen=True, slots=True)
class HeldMapping:
    """Attributes of a module or object: what is there now, and what was."""

    label: str
    owner: object
    live: Mapping[str, Any]
    kept: dict[str, Any]
    cls: type

    @property
    def id(self) -> int:
        """In places of numbers: of classes, `live` is another object each time."""
        return id(self.owner if isinstance(self.owner, type) else self.live)


@dataclass(frozen=True, slots=True)
class HeldContainer:
    """A container: what it is called, itself, and what lay in it."""

    label: str
    value: Any
    content: Any
    is_of_module: bool = False


class HeldTensor:
    """A tensor that is no state: how often it was written, and its values if it is small."""

    __slots__ = ("copy", "label", "tensor", "version")

    def __init__(self, label: str, tensor: Tensor) -> None:
        self.label, self.tensor, self.version = label, tensor, _version(tensor)
        small = tensor.numel() <= _MOST_ELEMENTS and tensor.device.type == "cpu"
        self.copy = tensor.detach().clone() if small else None

    def is_same(self) -> bool:
        """Whether nobody has written to it, as far as that is known, and no step trains it."""
        if isinstance(self.tensor, Connected) or _version(self.tensor) != self.version:
            return False
        if self.copy is None or torch.equal(self.copy, self.tensor):
            return True
        return bool(torch.allclose(self.copy, self.tensor, rtol=0, atol=0, equal_nan=True))


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def is_identical(live: Mapping[Any, Any], kept: Mapping[Any, Any]) -> bool:
    """Whether the same objects lie in two mappings, in the same order."""
    return len(live) == len(kept) and all(map(operator.is_, live.values(), kept.values()))


def surroundings() -> tuple[object, ...]:
    """Return what surrounds each operator, whatever the program is."""
    casts = (
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        for device in ("cpu", "cuda")
    )
    return (torch.get_default_dtype(), *casts)


def hooks_of(tensors: Iterable[Tensor]) -> list[list[object] | None]:
    """Return the hooks on the gradient of each tensor."""
    found = []
    for one in tensors:
        first, second = one._backward_hooks, one._post_accumulate_grad_hooks
        found.append([*(first or ()), *(second or ())] if first or second else None)
    return found


def num_attributes(tensors: Iterable[Tensor]) -> list[int]:
    """Return how many attributes somebody has set on each tensor."""
    return [len(held) - (OWNER in held) for held in map(vars, tensors)]
