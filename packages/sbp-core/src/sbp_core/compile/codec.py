"""Turn plans and other frozen values of ours into few bytes and back, fast. No torch.

A value is written as a table in which equal parts stand once: instructions that every rank
executes, actors of ranks in equal positions, placements. Reading makes each part once too, so a
plan of four ranks takes hardly longer to read than that of one.

    classes   [module, name, kind, fields]        of dataclasses, enums and tuples with a name
    atoms     strings, numbers, True, False, None
    records   [kind or class, number of a part, number of a part, ...], parts before wholes

The table is JSON, so reading it runs no code but the `__new__` and `__post_init__` of classes of
this package, unlike pickle. What is read may still be wrong; a plan runs the operators of torch
that it names, whoever wrote it.

>>> from sbp_core.graph.ir import Ref
>>> decode(encode((Ref("x"), {"scale": 0.5}, Ref("x"))))
(%x, {'scale': 0.5}, %x)
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from sbp_core.errors import SbpError, SbpTypeError, SbpValueError

FORMAT = 1

#: Only classes of these packages are written and read.
PACKAGES = ("sbp_core", "sbp_actor_runtime", "sbp_planner", "sbp_launch")

_TUPLE, _LIST, _DICT, _SET, _CLASS = 0, 1, 2, 3, 4

#: What a class is.
_FIELDS, _ENUM, _ENTRIES = "fields", "enum", "entries"

_Make = Callable[[list[Any]], Any]

_ATOMS = (str, int, float, bool, type(None))

#: What reading bytes that are no value of ours ends in.
_WRONG = (
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    ImportError,
    AssertionError,
    RecursionError,
    SbpError,
)


def encode(value: object) -> bytes:
    """Return a value as bytes, the same for the same value with its dicts in the same order.

    Args:
        value: Numbers, strings, None, tuples, lists, frozen sets and mappings; classes of ours.

    Raises:
        SbpTypeError: it holds something else.
    """
    writer = _Writer()
    root = writer.add(value)
    table = {
        "format": FORMAT,
        "classes": [_described(cls) for cls in writer.classes],
        "atoms": writer.atoms,
        "records": writer.records,
        "root": root,
    }
    return json.dumps(table, separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """Read what `encode` wrote; tuples stay tuples, lists lists.

    Equal parts of the value are one object, so its dicts and lists are not to be changed.

    Raises:
        SbpValueError: the bytes are none, or were written by a version whose classes differ.
    """
    try:
        table = json.loads(data)
        if table["format"] != FORMAT:
            raise SbpValueError(
                f"a value of format {table['format']!r}", accepted=f"format {FORMAT}"
            )
        return _read(table)
    except SbpValueError:
        raise
    except _WRONG as error:
        raise SbpValueError(
            f"bytes that hold no value of ours: {type(error).__name__}: {error}",
            todo="write them again with this version",
        ) from error


class _Writer:
    """The tables while a value is taken apart.

    Numbers of parts count atoms and records separately: atom `n` is `-1 - n`, record `n` is `n`.
    """

    def __init__(self) -> None:
        self.classes: dict[type, int] = {}
        self.atoms: list[Any] = []
        self.records: list[list[int]] = []
        self._atom_numbers: dict[tuple[type, Any], int] = {}
        self._record_numbers: dict[tuple[int, ...], int] = {}
        self._seen: dict[int, int] = {}
        self._kept: list[object] = []
        self._fields: dict[type, tuple[str, ...]] = {}

    def add(self, value: object) -> int:
        """Return the number of a value, adding it and its parts if they are new."""
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return self._atom(kind, value, value)
        if kind is float:
            # By its text, as 0.0 equals -0.0, and NaN nothing.
            return self._atom(kind, repr(value), value)
        number = self._seen.get(id(value))
        if number is None:
            number = self._record(self._parts(kind, value))
            self._seen[id(value)] = number
            self._kept.append(value)  # else its id could come again
        return number

    def _atom(self, kind: type, key: object, value: object) -> int:
        number = self._atom_numbers.get((kind, key))
        if number is None:
            number = self._atom_numbers[(kind, key)] = -1 - len(self.atoms)
            self.atoms.append(value)
        return number

    def _record(self, record: tuple[int, ...]) -> int:
        number = self._record_numbers.get(record)
        if number is None:
            number = self._record_numbers[record] = len(self.records)
            self.records.append(list(record))
        return number

    def _parts(self, kind: type, value: Any) -> tuple[int, ...]:
        add = self.add
        if kind is tuple:
            return (_TUPLE, *map(add, value))
        if kind is list:
            return (_LIST, *map(add, value))
        if kind is frozenset:
            return (_SET, *map(add, sorted(value, key=repr)))
        names = self._fields.get(kind)
        if names is None and isinstance(value, Mapping) and not is_dataclass(kind):
            return (_DICT, *(add(part) for pair in value.items() for part in pair))
        if names is None:
            _check_class(kind)
            names = self._fields[kind] = _field_names(kind)
        number = _CLASS + self.classes.setdefault(kind, len(self.classes))
        if isinstance(value, Enum):
            return (number, add(value.value))
        if isinstance(value, tuple):
            return (number, *map(add, value))
        return (number, *(add(getattr(value, name)) for name in names))


def _check_class(cls: type) -> None:
    ours = cls.__module__.split(".")[0] in PACKAGES
    if not ours or not (is_dataclass(cls) or issubclass(cls, Enum | tuple)):
        raise SbpTypeError(
            f"a {cls.__module__}.{cls.__qualname__} cannot be written",
            accepted=f"plain values; dataclasses, enums and tuples of {', '.join(PACKAGES)}",
        )


def _field_names(cls: type) -> tuple[str, ...]:
    if is_dataclass(cls):
        return tuple(field.name for field in fields(cls))
    return tuple(getattr(cls, "_fields", ()))  # of a named tuple


def _described(cls: type) -> list[Any]:
    kind = _FIELDS if is_dataclass(cls) else _ENUM if issubclass(cls, Enum) else _ENTRIES
    return [cls.__module__, cls.__qualname__, kind, list(_field_names(cls))]


def _read(table: Mapping[str, Any]) -> Any:
    makers = [_maker(*entry) for entry in table["classes"]]
    # Atoms are counted from the end: value -1 is the first atom.
    atoms = table["atoms"]
    records = table["records"]
    if not all(isinstance(atom, _ATOMS) for atom in atoms):
        raise SbpValueError("an atom is a list or object", accepted="strings, numbers, null")
    first = -len(atoms)
    values: list[Any] = [None] * len(records) + atoms[::-1]
    for number, (kind, *parts) in enumerate(records):
        if kind < 0 or (parts and not first <= min(parts) <= max(parts) < number):
            raise SbpValueError(
                f"record {number} is {[kind, *parts]}", accepted="parts that come before it"
            )
        found = [values[part] for part in parts]
        if kind >= _CLASS:
            values[number] = makers[kind - _CLASS](found)
        elif kind == _TUPLE:
            values[number] = tuple(found)
        elif kind == _LIST:
            values[number] = found
        elif kind == _SET:
            values[number] = frozenset(found)
        else:
            values[number] = dict(zip(found[::2], found[1::2], strict=True))
    root = table["root"]
    if not first <= root < len(records):
        raise SbpValueError(f"the value is part {root}", accepted=f"{first} .. {len(records) - 1}")
    return values[root]


def _maker(module: str, name: str, kind: str, names: Iterable[str]) -> _Make:
    """Return what makes an object of a class from its parts.

    Raises:
        SbpValueError: the class is not ours, or has other fields now.
    """
    path = module.split(".")
    if path[0] not in PACKAGES or "__main__" in path:
        raise SbpValueError(f"a class of {module!r}", accepted=", ".join(PACKAGES))
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    _check_class(cls)
    if _described(cls) != [module, name, kind, list(names)]:
        raise SbpValueError(
            f"{module}.{name} was written with the fields {', '.join(names)}",
            accepted=", ".join(_field_names(cls)),
            todo="write it again with this version",
        )
    if kind == _ENUM:
        return lambda found: cls(found[0])
    if kind == _ENTRIES:
        return lambda found: tuple.__new__(cls, found)
    return _filler(cls, tuple(names))


def _filler(cls: Any, names: tuple[str, ...]) -> _Make:
    """Return what makes a frozen dataclass without its `__init__`, which takes far longer.

    Slots are filled by their descriptors.
    """
    fill = _blank_filler(cls, names)
    check = getattr(cls, "__post_init__", None)
    if check is None:
        return fill

    def checked(found: list[Any]) -> Any:
        made = fill(found)
        check(made)
        return made

    return checked


def _blank_filler(cls: Any, names: tuple[str, ...]) -> _Make:
    """Return what makes a dataclass of its fields and does not validate it."""
    new = cls.__new__
    slots = [getattr(cls, name, None) for name in names]
    if "__slots__" in cls.__dict__ and all(hasattr(slot, "__set__") for slot in slots):
        setters = [slot.__set__ for slot in slots if slot is not None]

        def fill(found: list[Any]) -> Any:
            made = new(cls)
            for setter, part in zip(setters, found, strict=True):
                setter(made, part)
            return made

        return fill

    def update(found: list[Any]) -> Any:
        made = new(cls)
        made.__dict__.update(zip(names, found, strict=True))
        return made

    return update
