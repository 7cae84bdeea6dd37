"""What functions read beside their arguments: names, cells, globals, and what these lead to.

PyTorch's and Python's own functions are taken to be what they are: only the names of attributes in
them count, as `self.eps` in a layer of `torch.nn`. Functions of everybody else are followed into
the functions that they call.
"""

from __future__ import annotations

import argparse
import dis
import functools
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from sbp_torch.capture.numbers import NumberPlace

#: Packages whose functions and objects stay as they are.
_FIXED = {
    *sys.stdlib_module_names,
    "numpy",
    "sbp_aten",
    "sbp_core",
    "sbp_launch",
    "sbp_torch",
    "torch",
}
_FIXED -= {"__main__"}

#: Objects of Python's own that are there to hold settings.
_SETTINGS = (argparse.Namespace, types.SimpleNamespace)

#: Objects of PyTorch that losses read, and loops change.
_OF_TORCH = (
    torch.distributions.Distribution,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
)

#: What reads attributes whose names no code says.
_ANY_NAME = {
    *("getattr", "vars", "__dict__", "attrgetter", "eval", "exec", "locals"),
    *("asdict", "astuple", "fields", "model_dump", "_asdict"),
}

#: What finds globals by texts.
_BY_TEXT = {"globals", "eval", "exec", "vars"}

#: Methods that are called by what they are for, without their names.
_CALLED = {"__call__", "__getattr__", "__getattribute__", "__getitem__", "forward", "step"}

#: Those of a `torch.autograd.Function`.
_CALLED_IN_BACKWARD = {"forward", "setup_context", "backward", "vjp", "jvp", "vmap"}

#: Special methods that make, copy and show objects; the others are called by operators.
_OF_OBJECTS = {
    *("__init__", "__new__", "__post_init__", "__init_subclass__", "__class_getitem__", "__del__"),
    *("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__setattr__", "__delattr__", "__sizeof__", "__dir__", "__subclasshook__"),
}

#: What shows an object as text, and the operators of f-strings that call it.
_SHOWN = {"__format__", "__str__", "__repr__"}
_FORMATS = {
    dis.opmap[name]
    for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE")
    if name in dis.opmap
}

#: Objects of Python's own that call what they hold, or read attributes.
_GETTERS = (operator.attrgetter, operator.methodcaller, operator.itemgetter)

#: Where functions keep defaults.
_DEFAULTS = {"__defaults__": "defaults", "__kwdefaults__": "keyword defaults"}

_IDENTIFIER = re.compile(r"[^\W\d]\w*")

#: Functions that are followed; a program that calls more of its own is followed so far.
_MOST_FUNCTIONS = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a function finds a value.

    Args:
        label: As the function writes it: `beta`, `config.beta`.
        where: The function's file and line.
        read: Returns what is there now; raises if there is nothing.
        write: Puts another value there.
        value: What was there.
        at: The id of what holds it, and the key there; the same of one place that several read.
    """

    label: str
    where: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    value: Any
    at: tuple[int, Hashable]

    def number(self) -> NumberPlace:
        """Return it as the place of a number."""
        return NumberPlace(label=self.label, at=self.at, read=self.read, write=self.write)


class Reads:
    """What some functions may read.

    Attributes:
        names: Attributes and keys that their code names.
        remembered: Those that a function names which is not called again for the same arguments.
        any_name: Whether some of it asks for attributes by names that it makes up.
        places: Cells, globals, attributes of modules of Python and of classes.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.remembered: set[str] = set()
        self.any_name = False
        self.places: list[Place] = []
        self._codes: list[types.CodeType] = []
        self._seen: dict[int, object] = {}  # itself by its id, so that the id stays its own
        self._functions = 0
        #: Classes whose attributes may be what somebody set.
        self.classes: list[type] = []
        self._modules: list[tuple[str, types.ModuleType, str]] = []
        #: Of classes: name, label, value, and whether the class is fixed.
        self._kept: list[tuple[str, str, object, bool]] = []
        self._met: set[tuple[int, str]] = set()

    def may_read(self, name: str) -> bool:
        """Whether the code may ask for an attribute."""
        return self.any_name or name in self.names

    def line_of(self, name: str) -> str:
        """Return where the users' code first names something, as `file:line`; or ""."""
        for code in self._codes:
            for instruction in dis.get_instructions(code):
                if instruction.argval == name and instruction.positions is not None:
                    return f"{code.co_filename}:{instruction.positions.lineno}"
        return ""

    def add(self, called: object, label: str = "loss") -> Iterator[tuple[str, object]]:
        """Follow what is called; yield the objects that it leads to, with what they are called.

        Args:
            called: A function, a method, a partial, a class, or an object with `__call__`.
            label: What messages call it.
        """
        if isinstance(called, functools.partial):
            yield from self.add(called.func, label)
            for number, value in enumerate(called.args):
                yield f"{label}.args[{number}]", value
            yield f"{label}.keywords", called.keywords
        elif isinstance(called, _GETTERS):
            # Such as attrgetter("layer.beta") and methodcaller("get", holder).
            parts = called.__reduce__()[1]
            self.names.update(part for text in _texts([parts]) for part in text.split("."))
            yield label, parts
        elif isinstance(called, types.MethodType):
            yield "self", called.__self__
            yield from self.add(called.__func__, label)
        elif isinstance(called, types.FunctionType):
            yield from self._function(called)
        elif isinstance(called, type):
            yield from self.add_class(called)
        elif isinstance(called, functools._lru_cache_wrapper):
            alone = Reads()
            deque(alone.add(called.__wrapped__), maxlen=0)
            self.remembered |= alone.names
            yield from self.add(called.__wrapped__, label)
        else:
            yield label, called

    def add_class(self, cls: type) -> Iterator[tuple[str, object]]:
        """Follow what is called without a name, and keep the other methods until code names them.

        A class has many methods, to save and to load and to generate, that no step calls.
        """
        if type(cls) is not type:
            yield from self.add_class(type(cls))
        in_backward = issubclass(cls, torch.autograd.Function)
        for base in cls.__mro__:
            if base in (object, nn.Module, torch.optim.Optimizer) or not self._is_new(base):
                continue
            for name, value in list(vars(base).items()):
                if (
                    name in _CALLED
                    or (in_backward and name in _CALLED_IN_BACKWARD)
                    or (_is_of_operators(name) and not is_fixed(base))
                ):
                    function = _function_of(value)
                    if function is not None:
                        yield from self._function(function)
                elif name != "__init__":
                    self._kept.append((name, f"{base.__name__}.{name}", value, is_fixed(base)))
            if not is_fixed(base):
                self.classes.append(base)

    def add_slots(self, value: object, label: str) -> Iterator[tuple[str, object]]:
        """Yield what an object holds in slots, as far as the code so far names them."""
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name) and not name.startswith("__"):
                    yield from self._at(
                        f"{label}.{name}",
                        functools.partial(getattr, value, name),
                        functools.partial(setattr, value, name),
                        getattr(value, name),
                        "",
                        (id(value), name),
                    )

    def again(self) -> Iterator[tuple[str, object]]:
        """Yield what classes, and modules of Python, hold under names that were met since."""
        kept, self._kept = self._kept, []
        for name, label, value, fixed in kept:
            function = _function_of(value)
            if name not in self.names:
                self._kept.append((name, label, value, fixed))
            elif function is not None:
                yield from self._function(function)
            elif not fixed:
                yield label, value
        for label, module, where in list(self._modules):
            for name in sorted(self.names & vars(module).keys()):
                if (id(vars(module)), name) not in self._met:
                    yield from self._item(f"{label}.{name}", vars(module), name, where)

    @property
    def has_more(self) -> bool:
        """Whether `again` would yield something."""
        return any(name in self.names for name, *_ in self._kept) or any(
            (id(vars(module)), name) not in self._met
            for _, module, _ in self._modules
            for name in self.names & vars(module).keys()
        )

    def _is_new(self, value: object) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new

    def _function(self, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        is_new = self._is_new(function) and not _is_generated(function)
        if not is_new or self._functions >= _MOST_FUNCTIONS:
            return
        self._functions += 1
        fixed = is_fixed(function)
        codes = list(_nested(function.__code__))
        texts = {text for code in codes for text in _texts(code.co_consts)}
        self.names.update(texts, *(code.co_names for code in codes))
        if any(_FORMATS.intersection(code.co_code[::2]) for code in codes):
            self.names |= _SHOWN
        # Wrappers, such as `torch.no_grad()`, have PyTorch's code, and the user's in a cell.
        where = _definition(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            yield from self._cell(name, cell, where)
        if fixed or _root(function.__globals__.get("__name__", "")) in _FIXED:
            return
        self._codes += codes
        used = {name for code in codes for name in code.co_names}
        self.any_name |= bool(used & _ANY_NAME)
        if used & {"str", "repr", "format", "print"}:
            self.names |= _SHOWN
        if used & _BY_TEXT:
            used.update(*map(_IDENTIFIER.findall, texts))
        for attribute, told in _DEFAULTS.items():
            if getattr(function, attribute) is not None:
                yield from self._at(
                    f"the {told} of {function.__qualname__}",
                    functools.partial(getattr, function, attribute),
                    functools.partial(setattr, function, attribute),
                    getattr(function, attribute),
                    where,
                    (id(function), attribute),
                )
        if vars(function):
            yield function.__qualname__, vars(function)
        for name in sorted(used & function.__globals__.keys()):
            yield from self._item(name, function.__globals__, name, where)

    def _cell(self, name: str, cell: types.CellType, where: str) -> Iterator[tuple[str, object]]:
        try:
            value = cell.cell_contents
        except ValueError:  # of a name that nothing was assigned to so far
            return
        if not self._is_new(cell) or name == "__class__":
            return

        def write(value: Any) -> None:
            cell.cell_contents = value

        at = (id(cell), "")
        yield from self._at(name, lambda: cell.cell_contents, write, value, where, at)

    def _item(
        self, label: str, items: dict[str, Any], key: str, where: str
    ) -> Iterator[tuple[str, object]]:
        value = items[key]
        self._met.add((id(items), key))
        if isinstance(value, types.ModuleType):
            if is_fixed(value):
                return
            if self._is_new(value):
                self._modules.append((label, value, where))
            return

        def write(value: Any) -> None:
            items[key] = value

        yield from self._at(label, lambda: items[key], write, value, where, (id(items), key))

    def _at(
        self,
        label: str,
        read: Callable[[], Any],
        write: Callable[[Any], None],
        value: object,
        where: str,
        at: tuple[int, Hashable],
    ) -> Iterator[tuple[str, object]]:
        self.places.append(
            Place(label=label, where=where, read=read, write=write, value=value, at=at)
        )
        if isinstance(value, Enum) or (isinstance(value, type) and is_fixed(value)):
            return
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial | type):
            yield from self.add(value, label)
        else:
            yield label, value


def is_fixed(value: object) -> bool:
    """Whether a function, class, module or object belongs to what stays as it is."""
    if isinstance(value, (*_SETTINGS, *_OF_TORCH)):
        return False
    if isinstance(value, types.ModuleType):
        return _root(value.__name__) in _FIXED
    named = value if isinstance(value, type | types.FunctionType) else type(value)
    return _root(named.__module__ or "") in _FIXED


def has_attributes(value: object) -> bool:
    """Whether what an object holds in attributes may be what somebody set."""
    return (
        (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))
        and not isinstance(value, type | types.FunctionType | types.ModuleType | Tensor | Enum)
        and not is_fixed(value)
    )


def modules_in_eval_mode(model: nn.Module) -> list[str]:
    """Return the modules in eval mode whose code asks for their mode, such as dropout."""
    found = []
    for path, module in model.named_modules():
        reads = Reads()
        deque(reads.add_class(type(module)), maxlen=0)
        if not module.training and "training" in reads.names:
            found.append(path or type(module).__name__)
    return found


def _is_of_operators(name: str) -> bool:
    """Whether a method is called by an operator or a statement: `a + b`, `for`, `with`."""
    return (
        name.startswith("__")
        and name.endswith("__")
        and name not in _OF_OBJECTS
        and name not in _SHOWN
    )


def _root(module: str) -> str:
    return module.partition(".")[0]


def _function_of(value: object) -> types.FunctionType | None:
    """Return the function that an entry of a class is or holds; None if it is none."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, staticmethod | classmethod | functools.cached_property):
        value = value.func if isinstance(value, functools.cached_property) else value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _is_generated(function: types.FunctionType) -> bool:
    """Whether `dataclasses` made a method: it reads all fields, and none for its own sake."""
    return function.__code__.co_filename == "<string>" and function.__name__.startswith("__")


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _texts(constants: Iterable[object]) -> Iterator[str]:
    """Yield the texts among constants: keys, and attributes that patterns of `match` name."""
    for one in constants:
        if isinstance(one, str):
            yield one
        elif isinstance(one, tuple):
            yield from _texts(one)


def _definition(function: types.FunctionType) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
