"""What a guard says of a change, and when a value is what it was."""

from __future__ import annotations

import ctypes
import functools
import random
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import torch
from torch import Tensor, nn

from sbp_torch.capture.numbers import NumberPlace
from sbp_torch.capture.side_effects import content_of, items_of

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
class Changed:
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


_C_DATA: Any = ctypes._SimpleCData | ctypes.Array | ctypes.Structure | ctypes.Union


class _Nothing:
    def __repr__(self) -> str:
        return "not there"


NOTHING: Any = _Nothing()


def held_in(value: Any) -> Any:
    """Return a copy of what a container holds, of a very long one both ends; None if it is none.

    A generator of random numbers holds its state, and so does an iterator, as far as it tells.
    """
    if isinstance(value, Iterator):
        return _place_of(value)
    if isinstance(value, random.Random):
        return [value.getstate()]
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, functools._lru_cache_wrapper):  # what it remembers may be forgotten
        told = value.cache_info()
        return [told.misses, told.currsize]
    if isinstance(value, ContextVar):
        return [value.get(None)]
    if isinstance(value, threading.local):  # as this thread sees it, which captures
        return dict(vars(value))
    if isinstance(value, _C_DATA | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, threading.Event):
        return [value.is_set()]
    if isinstance(value, SynchronizedBase):
        return bytes(value.get_obj())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return value.ravel().tolist()
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        state = value if isinstance(value, numpy.random.RandomState) else value.bit_generator
        return [repr(state.get_state() if hasattr(state, "get_state") else state.state)]
    if isinstance(value, Mapping):
        found = items_of(value)
        return found if len(found) <= MOST_ENTRIES else {"": len(found), **_ends(found.items())}
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


def _ends(items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    every = [*items]
    return dict([*every[:_END], *every[-_END:]])


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
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def mode_change(label: str, is_training: bool) -> Changed:
    """Return that a module is in another mode than when the step was captured."""
    mode = {True: "train", False: "eval"}
    return Changed(
        what=f"{label} is in {mode[is_training]} mode, and was in {mode[not is_training]} mode "
        "when the step was captured",
        todo=f"call {label}.{mode[not is_training]}() before the step; step.evaluate(batch) "
        f"evaluates without changing modes; or {ANEW}",
    )


def registered_change(label: str, kind: str, before: object, after: object) -> Changed:
    """Return that a module has another parameter, buffer or part: `kind` says which."""
    what = f"{label} is another {kind} than when the step was captured"
    if before is NOTHING:
        what = f"{label} is a new {kind}"
    elif after is NOTHING or after is None:
        what = f"the {kind} {label} was removed"
    both_tensors = isinstance(before, Tensor) and isinstance(after, Tensor)
    return Changed(what=what, is_structure=not (kind == "buffer" and both_tensors))
