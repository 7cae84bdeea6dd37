"""Analyse Python functions and classes: which names their bytecode uses, and which never change.

`reads` uses it to find the values that a captured program depends on. Code and objects of PyTorch,
the standard library and this project are "fixed": guards assume that they do not change.
"""

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

#: Packages whose functions and objects are fixed, in addition to the standard library.
_FIXED = {"numpy", "sbp_aten", "sbp_core", "sbp_launch", "sbp_torch", "torch"}

#: Folders of the standard library.
_OF_PYTHON = tuple(
    sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    for name in ("stdlib", "platstdlib")
)

#: Classes of the standard library whose objects hold settings of users.
_SETTINGS = (argparse.Namespace, types.SimpleNamespace)

#: Classes of PyTorch whose objects losses read and training loops change.
_OF_TORCH = (
    torch.amp.GradScaler,
    torch.distributions.Distribution,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.utils.data.Dataset,
)

#: Names that read attributes whose names are not in the code; so does `getattr` without a constant.
_ANY_NAME = {
    *("vars", "__dict__", "attrgetter", "eval", "exec", "locals", "__getattribute__"),
    *("asdict", "astuple", "fields", "model_dump", "_asdict"),
}

#: Functions that find globals by strings.
_BY_TEXT = {"globals", "eval", "exec", "vars"}

#: Methods that are called although no code names them.
_CALLED = {"__call__", "__getattr__", "__getattribute__", "__getitem__", "forward", "step"}

#: Methods of a `torch.autograd.Function` that are called although no code names them.
_CALLED_IN_BACKWARD = {"forward", "setup_context", "backward", "vjp", "jvp", "vmap"}

#: Special methods that are called when an object is created.
MAKES = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__"}

#: Special methods that copy and end objects; operators and statements call the rest.
_OF_OBJECTS = {
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__delattr__", "__sizeof__", "__dir__", "__subclasshook__", "__del__"),
}

#: Methods that show an object as text, functions that call them, and bytecode of f-strings.
SHOWN = {"__format__", "__str__", "__repr__"}
_SHOWS = {"str", "repr", "format", "print"}
_FORMATS = {
    dis.opmap[name]
    for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")
    if name in dis.opmap
}

#: Callables of the standard library that read attributes or items, or call methods.
GETTERS = (operator.attrgetter, operator.methodcaller, operator.itemgetter)

_IDENTIFIER = re.compile(r"[^\W\d]\w*")


class Code:
    """The code of a function and of the functions nested in it.

    Attributes:
        parts: The code objects.
        names: Attributes and globals that they name.
        texts: The strings among their constants.
        shows: Whether they format objects as text.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.parts = [*_nested_code(function.__code__)]
        self.names = {name for code in self.parts for name in code.co_names}
        self.texts = {text for code in self.parts for text in texts(code.co_consts)}
        self.shows = bool(self.names & _SHOWS) or any(
            _FORMATS.intersection(code.co_code[::2]) for code in self.parts
        )

    @property
    def any_name(self) -> bool:
        """Whether the code computes attribute names, as in `getattr(x, name)`."""
        if self.names & _ANY_NAME:
            return True
        return "getattr" in self.names and not all(map(_gets_by_text, self.parts))

    def named_by(self, *instructions: str) -> set[str]:
        """Return the names in instructions of some kinds, such as modules in `IMPORT_NAME`."""
        every = (one for code in self.parts for one in dis.get_instructions(code))
        return {one.argval for one in every if one.opname in instructions}

    def globals(self) -> set[str]:
        """Return the globals that the code names or may find by strings."""
        found = self.named_by("LOAD_GLOBAL", "LOAD_NAME")
        if self.names & _BY_TEXT:
            found.update(*map(_IDENTIFIER.findall, self.texts))
        return found


def is_fixed(value: object) -> bool:
    """Whether a function, class, module or object is fixed: guards need not compare it."""
    if isinstance(value, (*_SETTINGS, *_OF_TORCH)):
        return False
    if isinstance(value, types.ModuleType):
        return is_fixed_module(value.__name__)
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    return is_fixed_module(named.__module__ or "")


@functools.cache
def is_fixed_module(name: str) -> bool:
    """Whether a Python module belongs to the standard library or to a package in `_FIXED`."""
    root = name.partition(".")[0]
    if root not in sys.stdlib_module_names or root == "__main__":
        return root in _FIXED
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or file.startswith(_OF_PYTHON)  # else a user's module has this name


@functools.cache
def is_installed_module(name: str) -> bool:
    """Whether a Python module was installed, such as a library of models.

    Only names that code mentions are followed in such modules: their constructors and special
    methods read thousands of places that no loop changes.
    """
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None) or ""
    return any(folder in file for folder in ("site-packages", "dist-packages"))


def has_attributes(value: object) -> bool:
    """Whether an object may have attributes that a user has set."""
    return (
        (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))
        and not isinstance(value, type | types.FunctionType | types.ModuleType | Tensor | Enum)
        and not is_fixed(value)
    )


def is_called(name: str, cls: type) -> bool:
    """Whether a step or its backward may call a method of a class although no code names it."""
    if name in _CALLED:
        return True
    if name in _CALLED_IN_BACKWARD and issubclass(cls, torch.autograd.Function):
        return True
    is_special = name.startswith("__") and name.endswith("__")
    is_own = not is_fixed(cls) and not is_installed_module(cls.__module__)
    return is_special and is_own and name not in {*MAKES, *_OF_OBJECTS, *SHOWN}


def makers(cls: type) -> Iterator[object]:
    """Yield the functions that are called when an object of a class is created."""
    for name in MAKES & vars(cls).keys():
        yield called_in(vars(cls)[name])
    if is_dataclass(cls):
        yield from (one.default_factory for one in fields(cls))


def called_in(value: object) -> Any:
    """Return the function that an entry of a class, such as a property, calls; None without one."""
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
    """Whether `dataclasses` generated a method, whose reads of all fields do not count."""
    return function.__code__.co_filename == "<string>" and function.__name__.startswith("__")


def texts(constants: Iterable[object]) -> Iterator[str]:
    """Yield the strings among constants: keys, and attributes in patterns of `match`."""
    for one in constants:
        if isinstance(one, str):
            yield one
        elif isinstance(one, tuple):
            yield from texts(one)


def _nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested_code(constant)


def _gets_by_text(code: types.CodeType) -> bool:
    """Whether each `getattr` of a code object has a constant name, as in `getattr(a.b, "c", 1)`."""
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
