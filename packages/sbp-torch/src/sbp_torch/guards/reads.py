"""Find the Python values that a function may read in addition to its arguments, for guards.

A captured step depends on globals, closure cells, defaults and attributes that loss, modules and
optimizer have read. `Reads` analyses the bytecode of functions and of the functions that they call,
and collects these places. `Guard` compares their values before later steps.

Code of PyTorch and of the standard library is assumed not to change. Only the attribute names in it
count, such as `self.eps` in a layer of `torch.nn`.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from sbp_torch.graph_capture.numbers import NumberPlace
from sbp_torch.guards.functions import (
    GETTERS,
    MAKES,
    SHOWN,
    Code,
    called_in,
    is_called,
    is_fixed,
    is_fixed_module,
    is_generated,
    is_installed_module,
    makers,
    texts,
)
from sbp_torch.guards.recorded_values import NOTHING

#: Attributes in which functions keep defaults.
_DEFAULTS = {"__defaults__": "defaults", "__kwdefaults__": "keyword defaults"}

#: Largest number of functions to follow; the rest of a larger program is not followed.
_MOST_FUNCTIONS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A place in which a function finds a value.

    Args:
        number: Reads and writes the place. Its label is the expression in the function, `beta` or
            `config.beta`. Reading raises an error if there is no value.
        where: The function's file and line.
        value: The value at the time of the analysis.
    """

    number: NumberPlace
    where: str
    value: Any

    def now(self) -> Any:
        """Return the present value; `NOTHING` if there is none."""
        try:
            return self.number.read()
        except (KeyError, ValueError):
            return NOTHING


class Reads:
    """The values that some functions may read.

    Attributes:
        names: Attributes and keys that their code names.
        missing: Globals that their code names and that do not exist.
        remembered: Names in functions with `functools.lru_cache`, which do not run again for equal
            arguments.
        any_name: Whether some code computes attribute names, as in `getattr(x, name)`.
        places: Cells, globals, and attributes of Python modules and of classes.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.remembered: set[str] = set()
        self.any_name = False
        self.places: list[Place] = []
        self._codes: list[types.CodeType] = []
        self._seen: dict[int, object] = {}  # itself by its id, so that the id stays its own
        self._functions = 0
        self._made: set[type] = set()
        #: By the id of a globals dict: the dict, and missing name -> file and line that names it.
        self.missing: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}
        #: Classes whose attributes a user may have set.
        self.classes: list[type] = []
        self._modules: list[tuple[str, types.ModuleType]] = []
        #: Entries of classes not yet named by code: name, label, value, and is the class fixed.
        self._kept: list[tuple[str, str, object, bool]] = []
        self._met: set[tuple[int, str]] = set()

    def may_read(self, name: str) -> bool:
        """Whether the code may read an attribute."""
        return self.any_name or name in self.names

    def line_of(self, name: str) -> str:
        """Return the place where the user's code first uses a name, as `file:line`; or ""."""
        for code in self._codes:
            for instruction in dis.get_instructions(code):
                if instruction.argval == name and instruction.positions is not None:
                    return f"{code.co_filename}:{instruction.positions.lineno}"
        return ""

    def add(self, called: object, label: str = "loss") -> Iterator[tuple[str, object]]:
        """Follow a callable. Yield the objects that it reads, with labels; the caller visits them.

        Args:
            called: A function, a method, a partial, a class, or an object with `__call__`.
            label: Name of the callable in messages.
        """
        if isinstance(called, functools.partial):
            yield from self.add(called.func, label)
            for number, value in enumerate(called.args):
                yield f"{label}.args[{number}]", value
            yield f"{label}.keywords", called.keywords
        elif isinstance(called, GETTERS):
            # For example attrgetter("layer.beta") or methodcaller("get", holder).
            parts = called.__reduce__()[1]
            self.names.update(part for text in texts([parts]) for part in text.split("."))
            yield label, parts
        elif isinstance(called, types.MethodType):
            yield "self", called.__self__
            yield from self.add(called.__func__, label)
        elif isinstance(called, types.FunctionType):
            yield from self._function(called)
        elif isinstance(called, type):
            yield from self.add_class(called, makes=True)
        elif isinstance(called, functools._lru_cache_wrapper):
            alone = Reads()
            deque(alone.add(called.__wrapped__), maxlen=0)
            self.remembered |= alone.names
            yield from self.add(called.__wrapped__, label)
        else:
            yield label, called

    def add_class(self, cls: type, *, makes: bool = False) -> Iterator[tuple[str, object]]:
        """Follow methods that run without being named. Other methods wait until code names them.

        Many methods of a class, such as those that save, load or generate, run in no step.

        Args:
            cls: The class of an object, or a class that the code reads.
            makes: Whether the code may create objects of the class.
        """
        for base in cls.__mro__:
            if base in (object, nn.Module, torch.optim.Optimizer):
                continue
            is_of_others = is_fixed(base) or is_installed_module(base.__module__)
            if makes and base not in self._made and not is_of_others:
                self._made.add(base)
                for called in makers(base):
                    yield from self._follow(called, base.__name__)
            if not self._is_new(base):
                continue
            for name, value in list(vars(base).items()):
                label = f"{base.__name__}.{name}"
                if is_called(name, base):
                    yield from self._follow(called_in(value), label)
                elif name not in MAKES:  # `makers` yields these
                    self._kept.append((name, label, value, is_fixed(base)))
            if not is_fixed(base):
                self.classes.append(base)
        if type(cls) is not type and id(type(cls)) not in self._seen:
            yield from self.add_class(type(cls))

    def _follow(self, called: object, label: str) -> Iterator[tuple[str, object]]:
        if callable(called):
            yield from self.add(called, label)

    def add_module(self, module: types.ModuleType, label: str) -> None:
        """Follow the entries of a Python module that code names."""
        if not is_fixed(module) and self._is_new(module):
            self._modules.append((label, module))

    def add_slots(self, value: object, label: str) -> Iterator[tuple[str, object]]:
        """Yield the values in the `__slots__` of an object."""
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and not name.startswith("__"):
                    yield from self._attribute(f"{label}.{name}", value, name, "")

    def new_entries(self) -> Iterator[tuple[str, object]]:
        """Yield entries of classes and modules whose names were found since the last call."""
        kept, self._kept = self._kept, []
        for name, label, value, fixed in kept:
            called = called_in(value)
            if name not in self.names:
                self._kept.append((name, label, value, fixed))
            elif called is not None:
                yield from self._follow(called, label)
            elif not fixed:
                yield label, value
        for label, items, name in self._new_module_entries():
            yield from self._item(label, items, name, "")

    @property
    def has_more(self) -> bool:
        """Whether `new_entries` would yield something."""
        return any(name in self.names for name, *_ in self._kept) or any(self._new_module_entries())

    def _new_module_entries(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the entries of Python modules that code names and that were not yielded yet."""
        for label, module in list(self._modules):
            for name in sorted(self.names & vars(module).keys()):
                if (id(vars(module)), name) not in self._met:
                    yield f"{label}.{name}", vars(module), name

    def _is_new(self, value: object) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new

    def _function(self, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        is_new = self._is_new(function) and not is_generated(function)
        if not is_new or self._functions >= _MOST_FUNCTIONS:
            return
        self._functions += 1
        code = Code(function)
        self.names |= code.names | code.texts
        if code.shows:
            self.names |= SHOWN
        # Wrappers, such as `torch.no_grad()`, have PyTorch's code, and the user's in a cell.
        where = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            yield from self._cell(name, cell, where)
        if is_fixed(function) or is_fixed_module(function.__globals__.get("__name__", "")):
            return
        self._codes += code.parts
        self.any_name |= code.any_name
        for attribute, told in _DEFAULTS.items():
            if getattr(function, attribute) is not None:
                label = f"the {told} of {function.__qualname__}"
                yield from self._attribute(label, function, attribute, where)
        if vars(function):
            yield function.__qualname__, vars(function)
        named = code.globals()
        for name in sorted(named & function.__globals__.keys()):
            yield from self._item(name, function.__globals__, name, where)
        if is_installed_module(function.__module__ or ""):
            return
        for name in code.named_by("IMPORT_NAME"):
            if isinstance(module := sys.modules.get(name), types.ModuleType):
                self.add_module(module, name)
        _, missing = self.missing.setdefault(id(function.__globals__), (function.__globals__, {}))
        missing |= dict.fromkeys(named - function.__globals__.keys(), where)

    def _cell(self, name: str, cell: types.CellType, where: str) -> Iterator[tuple[str, object]]:
        if not self._is_new(cell) or name == "__class__":
            return

        def read() -> Any:
            try:
                return cell.cell_contents
            except ValueError:  # nothing was assigned to the name so far
                return NOTHING

        def write(value: Any) -> None:
            if value is not NOTHING:
                cell.cell_contents = value

        yield from self._add_place(name, read, write, where, (id(cell), ""))

    def _attribute(
        self, label: str, owner: object, name: str, where: str
    ) -> Iterator[tuple[str, object]]:
        read, write = (
            functools.partial(getattr, owner, name),
            functools.partial(setattr, owner, name),
        )
        yield from self._add_place(label, read, write, where, (id(owner), name))

    def _item(
        self, label: str, items: dict[str, Any], key: str, where: str
    ) -> Iterator[tuple[str, object]]:
        self._met.add((id(items), key))
        if isinstance(items[key], types.ModuleType) and is_fixed(items[key]):
            return
        read = functools.partial(operator.getitem, items, key)
        write = functools.partial(operator.setitem, items, key)
        yield from self._add_place(label, read, write, where, (id(items), key))

    def _add_place(
        self,
        label: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        where: str,
        at: tuple[int, Hashable],
    ) -> Iterator[tuple[str, object]]:
        number, value = NumberPlace(label=label, at=at, read=read, write=write), read()
        self.places.append(Place(number=number, where=where, value=value))
        is_of_none = value is NOTHING or isinstance(value, Enum)
        if is_of_none or (isinstance(value, type) and is_fixed(value)):
            return
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial | type):
            yield from self.add(value, label)
        else:
            yield label, value


def modules_in_eval_mode(model: nn.Module) -> list[str]:
    """Return the modules in eval mode whose code reads `training`, such as dropout."""
    found = []
    for path, module in model.named_modules():
        reads = Reads()
        deque(reads.add_class(type(module)), maxlen=0)
        if not module.training and "training" in reads.names:
            found.append(path or type(module).__name__)
    return found
