"""Batches of any nested form, as named tensors and back.

before: {"text": (ids, mask), "labels": y}           nested, as the loss takes it
after:  {"text.0": ids, "text.1": mask, "labels": y}  flat, as graphs and sessions name them

What is no tensor (numbers, strings, None) is a constant of the captured step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from sbp_core.errors import CaptureError

T = TypeVar("T")


def flatten_batch(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by name.

    Names are the keys and positions on the way, joined by dots; a batch that is one tensor is
    called `batch`.

    Args:
        batch: A tensor, or mappings, sequences, named tuples and dataclasses of such.

    Raises:
        CaptureError: two tensors would have one name.
    """
    if isinstance(batch, Tensor):
        return {"batch": batch}
    found: dict[str, Tensor] = {}
    for name, tensor in _leaves(batch, ""):
        if name in found:
            raise CaptureError(
                f"two tensors of the batch are called {name!r}", accepted="keys without dots"
            )
        found[name] = tensor
    return found


def rebuild_batch(batch: T, tensors: Mapping[str, Tensor]) -> T:
    """Return a batch of the same form with other tensors, by the names of `flatten_batch`."""
    if isinstance(batch, Tensor):
        return tensors["batch"]  # type: ignore[return-value] # T is Tensor
    made: T = _rebuilt(batch, "", tensors)
    return made


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Return the named parts of a container; None if it is none."""
    if isinstance(value, Mapping):
        return [(str(key), part) for key, part in value.items()]
    if isinstance(value, tuple | list):
        return [(str(index), part) for index, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(entry.name, getattr(value, entry.name)) for entry in fields(value)]
    return None


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
        return
    for name, part in _children(value) or ():
        yield from _leaves(part, f"{prefix}.{name}" if prefix else name)


def _rebuilt(value: Any, prefix: str, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return tensors[prefix]
    children = _children(value)
    if children is None:
        return value
    parts = [
        _rebuilt(part, f"{prefix}.{name}" if prefix else name, tensors) for name, part in children
    ]
    if isinstance(value, MutableMapping):
        twin = copy.copy(value)
        for key, part in zip(value, parts, strict=True):
            twin[key] = part
        return twin
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{name: part for (name, _), part in zip(children, parts, strict=True)}
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    return type(value)(parts)
