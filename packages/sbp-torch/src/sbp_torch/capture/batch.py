"""Batches of any nested form, as named tensors and back.

before: {"text": (ids, mask), "labels": y}           nested, as the loss takes it
after:  {"text.0": ids, "text.1": mask, "labels": y}  flat, as graphs and sessions name them

What is no tensor (numbers, strings, None) is a constant of the captured step. `flatten_batch` with
`captured` refuses a batch that has another one.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from sbp_core.errors import CaptureError

T = TypeVar("T")

#: What a batch may hold beside tensors.
_CONSTANTS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))


def flatten_batch(batch: Any, captured: Any = None) -> dict[str, Tensor]:
    """Return the tensors of a batch by name.

    Names are the keys and positions on the way, joined by dots; a batch that is one tensor is
    called `batch`.

    Args:
        batch: A tensor, or mappings, sequences, named tuples, dataclasses, and what is registered
            with `torch.utils._pytree`, of such.
        captured: The batch that the step was captured with; if given, what is no tensor has to be
            the same in both.

    Raises:
        CaptureError: two tensors would have one name; it holds an object of another kind, such as
            a NumPy array; or a number is not the one that the step was captured with.
    """
    if captured is not None:
        _check_constants(constants_of(batch), constants_of(captured))
    if isinstance(batch, Tensor):
        return {"batch": batch}
    found: dict[str, Tensor] = {}
    for name, value in _leaves(batch, ""):
        if not isinstance(value, Tensor):
            continue
        if name in found:
            raise CaptureError(
                f"two tensors of the batch are called {name!r}", accepted="keys without dots"
            )
        found[name] = value
    return found


def constants_of(batch: Any) -> dict[str, Any]:
    """Return what is no tensor in a batch, by name: the graph is captured for these values."""
    return {name: value for name, value in _leaves(batch, "") if not isinstance(value, Tensor)}


def _check_constants(given: Mapping[str, Any], captured: Mapping[str, Any]) -> None:
    for name in dict.fromkeys((*captured, *given)):
        now, then = given.get(name, _NOTHING), captured.get(name, _NOTHING)
        if type(now) is not type(then) or repr(now) != repr(then):
            raise CaptureError(
                f"{name!r} of the batch is {now!r}; the step was captured with {then!r}",
                accepted="the numbers and strings that the captured batch has",
                todo="make it a tensor in all batches, as in torch.tensor(2.0), or capture once "
                "for each value",
            )


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
    if isinstance(value, tuple | list | deque):
        return [(str(index), part) for index, part in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return [(entry.name, getattr(value, entry.name, None)) for entry in fields(value)]
    if isinstance(value, (Tensor, *_CONSTANTS)):
        return None
    parts, form = tree_flatten(value, is_leaf=lambda part: part is not value)
    if form.is_leaf():
        return None
    return [(str(index), part) for index, part in enumerate(parts)]


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield tensors and constants by name."""
    children = None if isinstance(value, Tensor) else _children(value)
    if children is not None:
        for name, part in children:
            yield from _leaves(part, f"{prefix}.{name}" if prefix else name)
        return
    if not isinstance(value, (Tensor, *_CONSTANTS)):
        kind = type(value)
        raise CaptureError(
            f"{prefix or 'the batch'!r} is a {kind.__module__}.{kind.__qualname__}: what it holds "
            "would be a constant of the captured step",
            accepted="tensors, numbers, strings and None, in mappings, sequences, dataclasses and "
            "nodes that are registered with torch.utils._pytree",
            todo="convert arrays by torch.from_numpy and their numbers by int() or float(); "
            "register a class by torch.utils._pytree.register_pytree_node, or make it a dataclass",
        )
    yield prefix, value


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
        rebuilt = copy.copy(value)
        for key, part in zip(value, parts, strict=True):
            rebuilt[key] = part
        return rebuilt
    if isinstance(value, Mapping):
        return dict(zip(value, parts, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if isinstance(value, deque):
        return type(value)(parts, value.maxlen)
    if isinstance(value, tuple | list):
        return type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        # Not made anew: what its constructor computes would be computed of other tensors.
        made: Any = copy.copy(value)
        for (name, _), part in zip(children, parts, strict=True):
            object.__setattr__(made, name, part)
        return made
    _, form = tree_flatten(value, is_leaf=lambda part: part is not value)
    return tree_unflatten(parts, form)


class _Nothing:
    def __repr__(self) -> str:
        return "not there"


_NOTHING = _Nothing()
