"""What functions and classes are made of, and which of them stay as they are."""

from __future__ import annotations

import argparse
import dis
import functools
import operator
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

#: Packages whose functions and objects stay as they are, besides those of Python.
_FIXED = {"numpy", "sbp_aten", "sbp_core", "sbp_launch", "sbp_torch", "torch"}

#: Where Python's own modules lie.
_OF_PYTHON = tuple(
    sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    for name in ("stdlib", "platstdlib")
)

#: Objects of Python's own that are there to hold settings.
_SETTINGS = (argparse.Namespace, types.SimpleNamespace)

#: Objects of PyTorch that losses read, and loops change.
_OF_TORCH = (
    torch.amp.GradScaler,
    torch.distributions.Distribution,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset,
)

#: What reads attributes whose names no code says; `getattr` does, unless it is given a text.
_ANY_NAME = {
    *("vars", "__dict__", "attrgetter", "eval", "exec", "locals", "__getattribute__"),
    *("asdict", "astuple", "fields", "model_dump", "_asdict"),
}

#: What finds globals by texts.
_BY_TEXT = {"globals", "eval", "exec", "vars"}

#: Methods that are called by what they are for, without their names.
_CALLED = {"__call__", "__getattr__", "__getattribute__", "__getitem__", "forward", "step"}

#: Those of a `torch.autograd.Function`.
_CALLED_IN_BACKWARD = {"forward", "setup_context", "backward", "vjp", "jvp", "vmap"}

#: Special methods that are called where an object is made.
MAKES = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__"}

#: Those that copy and end objects; all others are called by operators and statements.
_OF_OBJECTS = {
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__delattr__", "__sizeof__", "__dir__", "__subclasshook__", "__del__"),
}

#: What shows an object as text, what calls it, and the operators of f-strings that do.
SHOWN = {"__format__", "__str__", "__repr__"}
_SHOWS = {"str", "repr", "format", "print"}
_FORMATS = {
    dis.opmap[name]
    for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")
    if name in dis.opmap
}

#: Objects of Python's own that call what they hold, or read attributes.
GETTERS = (operator.attrgetter, operator.methodcaller, operator.itemgetter)

_IDENTIFIER = re.compile(r"[^\W\d]\w*")


class Code:
    """The code of a function, and of those that are written in it.

    Attributes:
        parts: Each of them.
        names: Attributes and globals that they name.
        texts: Among their constants.
        shows: Whether they make text of objects.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.parts = [*_nested(function.__code__)]
        self.names = {name for code in self.parts for name in code.co_names}
        self.texts = {text for code in self.parts for text in texts(code.co_consts)}
        self.shows = bool(self.names & _SHOWS) or any(
            _FORMATS.intersection(code.co_code[::2]) for code in self.parts
        )

    @property
    def any_name(self) -> bool:
        """Whether it asks for attributes by names that it makes up."""
        if self.names & _ANY_NAME:
            return True
        return "getattr" in self.names and not all(map(_gets_by_text, self.parts))

    def named_by(self, *instructions: str) -> set[str]:
        """Return the names in some kinds of instructions: `IMPORT_NAME` has modules."""
        every = (one for code in self.parts for one in dis.get_instructions(code))
        return {one.argval for one in every if one.opname in instructions}

    def globals(self) -> set[str]:
        """Return the globals that it names, and those that it may find by texts."""
        found = self.named_by("LOAD_GLOBAL", "LOAD_NAME")
        if self.names & _BY_TEXT:
            found.update(*map(_IDENTIFIER.findall, self.texts))
        return found


def is_fixed(value: object) -> bool:
    """Whether a function, class, module or object belongs to what stays as it is."""
    if isinstance(value, (*_SETTINGS, *_OF_TORCH)):
        return False
    if isinstance(value, types.ModuleType):
        return is_fixed_module(value.__name__)
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    return is_fixed_module(named.__module__ or "")


@functools.cache
def is_fixed_module(name: str) -> bool:
    """Whether a module of Python stays as it is: one of PyTorch, of Python itself, or of ours."""
    root = name.partition(".")[0]
    if root not in sys.stdlib_module_names or root == "__main__":
        return root in _FIXED
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or file.startswith(_OF_PYTHON)  # else the user's own has that name


@functools.cache
def is_installed_module(name: str) -> bool:
    """Whether a module of Python is one that was installed, such as a library of models.

    Of these, only what code names is followed: their constructors and special methods read
    thousands of places that no loop changes.
    """
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
    return any(folder in file for folder in ("site-packages", "dist-packages"))


def has_attributes(value: object) -> bool:
    """Whether what an object holds in attributes may be what somebody set."""
    return (
        (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))
        and not isinstance(value, type | types.FunctionType | types.ModuleType | Tensor | Enum)
        and not is_fixed(value)
    )


def is_called(name: str, cls: type) -> bool:
    """Whether a method of a class is called though no code names it, in a step or its backward."""
    if name in _CALLED:
        return True
    if name in _CALLED_IN_BACKWARD and issubclass(cls, torch.autograd.Function):
        return True
    is_special = name.startswith("__") and name.endswith("__")
    is_own = not is_fixed(cls) and not is_installed_module(cls.__module__)
    return is_special and is_own and name not in {*MAKES, *_OF_OBJECTS, *SHOWN}


def makers(cls: type) -> Iterator[object]:
    """Yield what is called where an object of a class is made."""
    for name in MAKES & vars(cls).keys():
        yield called_in(vars(cls)[name])
    if is_dataclass(cls):
        yield from (one.default_factory for one in fields(cls))


def called_in(value: object) -> Any:
    """Return what is called behind an entry of a class, such as a property; None if nothing is."""
    if isinstance(value, property):
        return value.fget
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, functools.cached_property):
        return value.func
    if isinstance(value, functools.partialmethod):
        return functools.partial(value.func, *value.args, **value.keywords)
    if isinstance(value, functools.singledispatchmethod):
        return value.dispatcher
    return value if isinstance(value, types.FunctionType) else None


def is_generated(function: types.FunctionType) -> bool:
    """Whether `dataclasses` made a method: it reads all fields, and none for its own sake."""
    return function.__code__.co_filename == "<string>" and function.__name__.startswith("__")


def texts(constants: Iterable[object]) -> Iterator[str]:
    """Yield the texts among constants: keys, and attributes that patterns of `match` name."""
    for one in constants:
        if isinstance(one, str):
            yield one
        elif isinstance(one, tuple):
            yield from texts(one)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _gets_by_text(code: types.CodeType) -> bool:
    """Whether each `getattr` of a code is told a name that the code has: `getattr(a.b, "c", 1)`."""
    left = [*dis.get_instructions(code)]
    for at, one in enumerate(left):
        if one.argval != "getattr" or not one.opname.startswith("LOAD"):
            continue
        behind = (other for other in left[at + 1 :] if other.opname != "CACHE")
        ends = next((other for other in behind if not _LOADS(other.opname)), None)
        if ends is None or ends.opname != "LOAD_CONST" or not isinstance(ends.argval, str):
            return False
    return True


_LOADS: Callable[[str], object] = re.compile(
    r"LOAD_(?!CONST)|PUSH_NULL|COPY_FREE_VARS|RESUME"
).match
