"""Record values that a captured program has read, compare them later, and describe their changes.

`Guard` (in `program`) records the values that a program has read, and compares them before a step.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import torch
from torch import Tensor, nn

from sbp_torch.graph_capture.fx_conversion import MAX_CONSTANT
from sbp_torch.graph_capture.numbers import NumberPlace
from sbp_torch.graph_capture.side_effects import MissingAttribute, content_of, items_of, shorten
from sbp_torch.guards.connected import OWNER, Connected, version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

#: Containers with more entries are compared at both ends only; entries at each end.
MOST_ENTRIES, _END = 10_000, 2_000

ANEW = (
    "continue with a new step: step.copy_to(model, optimizer), end the `with` block, and call "
    "parallelize again with the program as it is now"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedValue:
    """A change of the program since the step was captured.

    Args:
        what: A sentence that describes the change.
        where: The user's line that reads the value, as `file:line`; or "".
        todo: Advice to the user.
        is_structure: Whether modules, parameters or buffers were replaced, added or removed.
        number: The place of the value, if it was and is a float.
    """

    what: str
    where: str = ""
    todo: str = ANEW
    is_structure: bool = False
    number: NumberPlace | None = None


_C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)

#: Classes that are no containers, and functions that return the content of their objects.
_HOLDS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (random.Random, lambda one: [one.getstate()]),
    (torch.Generator, lambda one: one.get_state().numpy().tobytes()),
    # The cached results may be dropped.
    (functools._lru_cache_wrapper, lambda one: [*one.cache_info()[1::2]]),
    (ContextVar, lambda one: [one.get(None)]),
    (threading.local, lambda one: dict(vars(one))),  # in this thread, which captures
    ((*_C_DATA, bytearray, memoryview), bytes),
    (threading.Event, lambda one: [one.is_set()]),
    (SynchronizedBase, lambda one: bytes(one.get_obj())),
)

#: Stands for a missing value.
NOTHING: Any = MissingAttribute("not there")


def held_in(value: Any) -> Any:
    """Return a copy of the content of a container, or of both ends of a very long one; else None.

    The content of a random generator is its state, and of an iterator its position, if known.
    """
    if isinstance(value, Iterator):
        return _place_of(value)
    for kinds, holds in _HOLDS:
        if isinstance(value, kinds):
            return holds(value)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return value.ravel().tolist()
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        state = value if isinstance(value, numpy.random.RandomState) else value.bit_generator
        return [repr(state.get_state() if hasattr(state, "get_state") else state.state)]
    if isinstance(value, Mapping):
        found = items_of(value)
        if len(found) <= MOST_ENTRIES:
            return found
        every = [*found.items()]
        return {"": len(found), **dict([*every[:_END], *every[-_END:]])}
    found = content_of(value)
    if isinstance(found, list) and len(found) > MOST_ENTRIES:
        return [len(found), *found[:_END], *found[-_END:]]
    return found


def _place_of(iterator: Iterator[Any]) -> list[object] | None:
    """Return the position of an iterator; None if it is unknown."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [None if frame is None else (frame.f_lasti, repr(frame.f_locals))]
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns that 3.14 will not support this
        try:
            return [repr(iterator.__reduce__()[1:])]
        except TypeError:
            return None


def is_same(before: Any, after: Any) -> bool:
    """Whether a value is unchanged: the same object, or an equal number, string or container."""
    if before is after:
        return True
    if isinstance(before, Tensor | nn.Module) or type(before) is not type(after):
        return False
    if isinstance(before, PLAIN):
        return repr(before) == repr(after)  # nan is nan, and 0.0 is not -0.0
    old, new = held_in(before), held_in(after)
    if old is None or new is None:
        return False
    if isinstance(old, dict):
        return list(old) == list(new) and all(is_same(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return len(old) == len(new) and all(map(is_same, old, new))
    return bool(old == new)


def short(value: object) -> str:
    """Return a short description of a value for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list) and any(isinstance(one, Tensor) for one in value):
        return f"a {type(value).__name__} of {len(value)} with {short(value[0])}"
    return shorten(value)


def mode_change(label: str, is_training: bool) -> ChangedValue:
    """Return the description of a module whose mode has changed since the step was captured."""
    mode = {True: "train", False: "eval"}
    return ChangedValue(
        what=f"{label} is in {mode[is_training]} mode, and was in {mode[not is_training]} mode "
        "when the step was captured",
        todo=f"call {label}.{mode[not is_training]}() before the step; step.evaluate(batch) "
        f"evaluates without changing modes; or {ANEW}",
    )


def registered_change(label: str, kind: str, before: object, after: object) -> ChangedValue:
    """Return the description of a replaced, new or removed parameter, buffer or part (`kind`)."""
    what = f"{label} is another {kind} than when the step was captured"
    if before is NOTHING:
        what = f"{label} is a new {kind}"
    elif after is NOTHING or after is None:
        what = f"the {kind} {label} was removed"
    both_tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    return ChangedValue(what=what, is_structure=not (kind == "buffer" and both_tensors))


#: Name of the result of `surroundings` in messages.
SURROUNDINGS = "the default dtype, and the dtypes of torch.autocast on CPU and CUDA,"

#: Tensors with at most this many elements are compared by value, too, because the version counter
#: misses writes through `.data`. Larger tensors are no constants of a graph.
_MOST_ELEMENTS = MAX_CONSTANT


@dataclass(frozen=True, slots=True)
class HeldMapping:
    """Attributes of a module or object: the present mapping, and a copy of the former one."""

    label: str
    owner: object
    live: Mapping[str, Any]
    kept: dict[str, Any]
    cls: type

    @property
    def id(self) -> int:
        """The id of this mapping in places of numbers; `vars(cls)` is a new object each time."""
        return id(self.owner if isinstance(self.owner, type) else self.live)


@dataclass(frozen=True, slots=True)
class HeldContainer:
    """A container, its label in messages, and a copy of its former content."""

    label: str
    value: Any
    content: Any
    is_of_module: bool = False


class HeldTensor:
    """A tensor that is no state: its version counter, and a copy of its values if it is small."""

    __slots__ = ("copy", "label", "tensor", "version")

    def __init__(self, label: str, tensor: Tensor) -> None:
        self.label, self.tensor, self.version = label, tensor, version_of(tensor)
        small = tensor.numel() <= _MOST_ELEMENTS and tensor.device.type == "cpu"
        self.copy = tensor.detach().clone() if small else None

    def is_same(self) -> bool:
        """Whether no write to the tensor is known, and no step trains it."""
        if isinstance(self.tensor, Connected) or version_of(self.tensor) != self.version:
            return False
        if self.copy is None or torch.equal(self.copy, self.tensor):
            return True
        return bool(torch.allclose(self.copy, self.tensor, rtol=0, atol=0, equal_nan=True))


def is_identical(live: Mapping[Any, Any], kept: Mapping[Any, Any]) -> bool:
    """Whether two mappings have the same objects as values, in the same order."""
    return len(live) == len(kept) and all(map(operator.is_, live.values(), kept.values()))


def surroundings() -> tuple[object, ...]:
    """Return the global modes that affect operators: the default dtype and the autocast dtypes."""
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
    """Return the number of Python attributes that users have set on each tensor."""
    return [len(held) - (OWNER in held) for held in map(vars, tensors)]


def place_of(label: str, owner: object, items: Any, key: Hashable) -> NumberPlace:
    """Return the place of a number in a mapping or list.

    Args:
        label: Name of the place in messages.
        owner: The object whose attributes the items are; or the items themselves.
        items: The mapping or list.
        key: The key or index of the number.
    """
    is_class = isinstance(owner, type)  # only `setattr` can write attributes of a class
    return NumberPlace(
        label=label,
        at=(id(owner if is_class else items), key),
        read=partial(operator.getitem, items, key),
        write=partial(setattr, owner, str(key))
        if is_class
        else partial(operator.setitem, items, key),
    )


def is_float(value: object) -> bool:
    """Whether a value can become an input: a float, also `numpy.float64`; an int may be a size."""
    return isinstance(value, float)


class Numbers:
    """The numbers that a guard does not compare, because they are inputs of the step."""

    def __init__(self, places: Collection[NumberPlace]) -> None:
        self._by_place = {place.at: place for place in places}
        #: Positions of these numbers among the values of all mappings and lists.
        self._among: list[tuple[int, NumberPlace]] = []

    def __contains__(self, at: tuple[int, Hashable]) -> bool:
        return at in self._by_place

    def may_be(self, at: tuple[int, Hashable], value: object) -> bool:
        """Whether a value is allowed in a place: any float, where numbers are not compared."""
        return at in self._by_place and is_float(value)

    def find_among(self, held: Iterable[tuple[int, Collection[Hashable]]]) -> None:
        """Note the positions of these numbers among the values of mappings and lists.

        Args:
            held: For each mapping or list, its id in places and its keys.
        """
        every = ((number, key) for number, keys in held if self._by_place for key in keys)
        places = ((at, self._by_place.get(place)) for at, place in enumerate(every))
        self._among = [(at, place) for at, place in places if place is not None]

    def follow_in(self, lay: list[Any]) -> bool:
        """Write the present numbers into a list of former values; return whether all are floats.

        Raises:
            LookupError: a place is empty.
        """
        for position, place in self._among:
            lay[position] = place.read()
        return all(is_float(place.read()) for place in self._by_place.values())


def changed_floats(before: Sequence[object], after: Sequence[object]) -> list[int]:
    """Return the indices of changed entries of a list; none if a changed entry is no float."""
    if len(before) != len(after):
        return []
    pairs = [*zip(before, after, strict=True)]
    found = [at for at, (old, new) in enumerate(pairs) if not is_same(old, new)]
    return found if all(is_float(one) for at in found for one in pairs[at]) else []
