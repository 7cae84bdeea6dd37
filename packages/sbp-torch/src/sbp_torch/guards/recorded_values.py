"""What a guard keeps of what it compares, when a value is what it was, and how changes are told."""

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
from sbp_torch.graph_capture.side_effects import MissingAttribute, content_of, items_of, shortened
from sbp_torch.guards.connected import OWNER, Connected, version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

#: Of containers of more entries, both ends are compared.
MOST_ENTRIES = 10_000

#: Entries at each end.
_END = 2_000

ANEW = (
    "go on with a new step: step.copy_to(model, optimizer), end the `with` block, and call "
    "parallelize again with the program as it is now"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedValue:
    """What is not as it was when the step was captured.

    Args:
        what: A sentence.
        where: The user's line that reads it, as `file:line`; or "".
        todo: The way out.
        is_structure: Whether modules, parameters or buffers are others.
        number: Where it is, if it is a float and was another one.
    """

    what: str
    where: str = ""
    todo: str = ANEW
    is_structure: bool = False
    number: NumberPlace | None = None


_C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)

#: What objects hold that are no containers.
_HOLDS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (random.Random, lambda one: [one.getstate()]),
    (torch.Generator, lambda one: one.get_state().numpy().tobytes()),
    # What it remembers may be forgotten.
    (functools._lru_cache_wrapper, lambda one: [*one.cache_info()[1::2]]),
    (ContextVar, lambda one: [one.get(None)]),
    (threading.local, lambda one: dict(vars(one))),  # as this thread sees it, which captures
    ((*_C_DATA, bytearray, memoryview), bytes),
    (threading.Event, lambda one: [one.is_set()]),
    (SynchronizedBase, lambda one: bytes(one.get_obj())),
)

#: Stands for what is not there.
NOTHING: Any = MissingAttribute("not there")


def held_in(value: Any) -> Any:
    """Return a copy of what a container holds, of a very long one both ends; None if it is none.

    A generator of random numbers holds its state, and so does an iterator, as far as it tells.
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
    """Return how far an iterator is; None if nobody knows."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [None if frame is None else (frame.f_lasti, repr(frame.f_locals))]
    if type(iterator).__module__ not in ("builtins", "itertools"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 says that 3.14 will not tell
        try:
            return [repr(iterator.__reduce__()[1:])]
        except TypeError:
            return None


def is_same(before: Any, after: Any) -> bool:
    """Whether a value is what it was: itself, or an equal number, string, or container of such."""
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
    """Return what messages show of a value."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list) and any(isinstance(one, Tensor) for one in value):
        return f"a {type(value).__name__} of {len(value)} with {short(value[0])}"
    return shortened(value)


def mode_change(label: str, is_training: bool) -> ChangedValue:
    """Return that a module is in another mode than when the step was captured."""
    mode = {True: "train", False: "eval"}
    return ChangedValue(
        what=f"{label} is in {mode[is_training]} mode, and was in {mode[not is_training]} mode "
        "when the step was captured",
        todo=f"call {label}.{mode[not is_training]}() before the step; step.evaluate(batch) "
        f"evaluates without changing modes; or {ANEW}",
    )


def registered_change(label: str, kind: str, before: object, after: object) -> ChangedValue:
    """Return that a module has another parameter, buffer or part: `kind` says which."""
    what = f"{label} is another {kind} than when the step was captured"
    if before is NOTHING:
        what = f"{label} is a new {kind}"
    elif after is NOTHING or after is None:
        what = f"the {kind} {label} was removed"
    both_tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    return ChangedValue(what=what, is_structure=not (kind == "buffer" and both_tensors))


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
        self.label, self.tensor, self.version = label, tensor, version_of(tensor)
        small = tensor.numel() <= _MOST_ELEMENTS and tensor.device.type == "cpu"
        self.copy = tensor.detach().clone() if small else None

    def is_same(self) -> bool:
        """Whether nobody has written to it, as far as that is known, and no step trains it."""
        if isinstance(self.tensor, Connected) or version_of(self.tensor) != self.version:
            return False
        if self.copy is None or torch.equal(self.copy, self.tensor):
            return True
        return bool(torch.allclose(self.copy, self.tensor, rtol=0, atol=0, equal_nan=True))


def is_identical(live: Mapping[Any, Any], kept: Mapping[Any, Any]) -> bool:
    """Whether the same objects are in two mappings, in the same order."""
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


def place_of(label: str, owner: object, items: Any, key: Hashable) -> NumberPlace:
    """Return the place of a number in a mapping or list.

    Args:
        label: As messages call it.
        owner: Whose attributes the items are; or the items themselves.
        items: What holds it.
        key: Where.
    """
    is_class = isinstance(owner, type)  # whose attributes only `setattr` writes
    return NumberPlace(
        label=label,
        at=(id(owner if is_class else items), key),
        read=partial(operator.getitem, items, key),
        write=partial(setattr, owner, str(key))
        if is_class
        else partial(operator.setitem, items, key),
    )


def is_float(value: object) -> bool:
    """Whether a value can be an input: no bool, and no int, which may be a size.

    The 64-bit floats of NumPy are floats, too.
    """
    return isinstance(value, float)


class Numbers:
    """Says which numbers a guard does not compare."""

    def __init__(self, places: Collection[NumberPlace]) -> None:
        self._by_place = {place.at: place for place in places}
        #: Among what is in mappings and lists: where such a number is.
        self._among: list[tuple[int, NumberPlace]] = []

    def __contains__(self, at: tuple[int, Hashable]) -> bool:
        return at in self._by_place

    def may_be(self, at: tuple[int, Hashable], value: object) -> bool:
        """Whether a value may be in a place: another number, where numbers are not compared."""
        return at in self._by_place and is_float(value)

    def find_among(self, held: Iterable[tuple[int, Collection[Hashable]]]) -> None:
        """Note where numbers are among what is in mappings and lists.

        Args:
            held: Of each: its id in places, and its keys.
        """
        every = ((number, key) for number, keys in held if self._by_place for key in keys)
        places = ((at, self._by_place.get(place)) for at, place in enumerate(every))
        self._among = [(at, place) for at, place in places if place is not None]

    def follow_in(self, lay: list[Any]) -> bool:
        """Put the floats of now into what lay in mappings and lists; whether all are floats.

        Raises:
            LookupError: a place is empty.
        """
        for position, place in self._among:
            lay[position] = place.read()
        return all(is_float(place.read()) for place in self._by_place.values())


def changed_floats(before: Sequence[object], after: Sequence[object]) -> list[int]:
    """Return which entries of a list have changed; none if it is not only from floats to floats."""
    if len(before) != len(after):
        return []
    pairs = [*zip(before, after, strict=True)]
    found = [at for at, (old, new) in enumerate(pairs) if not is_same(old, new)]
    return found if all(is_float(one) for at in found for one in pairs[at]) else []
