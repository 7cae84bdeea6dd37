"""Parse pickles as plain data: nothing is imported or called.

An object that unpickling would create by a call is represented by a `PickleCall`, with the callable
and its arguments. Only globals that the caller lists may occur. Dicts are represented by `Pairs`,
because their keys may be `PickleCall`s.

>>> import pickle, os
>>> read_pickle(pickle.dumps({"a": (1, 2.5)}), known=[])["a"]
(1, 2.5)
>>> class Planted:
...     def __reduce__(self):
...         return os.system, ("touch planted",)
>>> read_pickle(pickle.dumps(Planted()), known=[], where="a file")
Traceback (most recent call last):
    ...
sbp_core.errors.ConfigError: the pickle asks for posix.system, which is none of its format
  in a file
  accepted here: numbers, texts, lists and mappings
  to fix it: do not open this file elsewhere: it may run what it asks for
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from sbp_core.errors import ConfigError
from sbp_core.serialize import shown

_TODO = "the file is damaged, or no checkpoint: get it again"

#: Python 3.11.0 to 3.11.3 write a member of an enum as `getattr(Enum, "member")`.
_MEMBER = "builtins.getattr"


@dataclass(frozen=True, slots=True)
class PickleGlobal:
    """A global that unpickling would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class PickleCall:
    """An object that unpickling would create.

    Args:
        of: The callable.
        args: Its arguments.
        state: The state that would be set afterwards, if any.
    """

    of: PickleGlobal
    args: tuple[Any, ...]
    state: Any = None

    def __getitem__(self, name: str) -> Any:
        """Return an attribute of the state.

        Raises:
            KeyError: there is none.
        """
        state = self.state
        if not isinstance(state, Pairs):
            raise KeyError(name)
        return state[name]


@dataclass(eq=False, slots=True)
class PersistentId:
    """A reference to data outside of the pickle, such as a storage."""

    key: Any


@dataclass(eq=False, slots=True)
class Pairs:
    """A dict of a pickle; keys may be any objects."""

    items: list[tuple[Any, Any]] = field(default_factory=list)

    def __getitem__(self, name: str) -> Any:
        found = [value for key, value in self.items if isinstance(key, str) and key == name]
        if not found:
            raise KeyError(name)
        return found[-1]


class _Mark:
    """Marks on the stack the start of a group of values."""


def read_pickle(data: bytes, known: Collection[str], where: str = "") -> Any:
    """Return the contents of a pickle as plain data.

    Args:
        data: The pickle.
        known: The globals that may occur, as `module.name`.
        where: The file, for messages.

    Raises:
        ConfigError: another global occurs, or the data are not a pickle.
    """
    return _Reader(known, where).read(data)


class _Reader:
    def __init__(self, known: Collection[str], where: str) -> None:
        self.known, self.where = known, where
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def read(self, data: bytes) -> Any:
        opcodes = pickletools.genops(data)
        while True:
            try:
                opcode, arg, _ = next(opcodes)
            except StopIteration:
                raise self._error("it has no end") from None
            except Exception as error:  # whatever pickletools raises on invalid data
                raise self._error(str(error)) from error
            if opcode.name == "STOP":
                return self._pop()
            self._do(opcode.name, arg)

    def _do(self, name: str, arg: Any) -> None:
        if name in _VALUES:
            if isinstance(arg, int) and not -(2**63) <= arg < 2**64:
                raise self._error("it has a number of more than 64 bits")
            self.stack.append(arg)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _MAKE_EMPTY:
            self.stack.append(_MAKE_EMPTY[name]())
        elif name in _TUPLES:
            self.stack.append(tuple(self._pop_many(_TUPLES[name])))
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            if arg not in self.memo:
                raise self._error(f"it refers to entry {arg}, which does not exist")
            self.stack.append(self.memo[arg])
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[arg] = self._top()
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self._top()
        elif name in _ACTIONS:
            _ACTIONS[name](self, arg)
        elif name not in ("PROTO", "FRAME"):
            raise self._error(f"its opcode {name} does not occur in checkpoints")

    # The stack.

    def _top(self) -> Any:
        if not self.stack or self.stack[-1] is _Mark:
            raise self._error("it takes a value from an empty stack")
        return self.stack[-1]

    def _pop(self) -> Any:
        found = self._top()
        self.stack.pop()
        return found

    def _pop_many(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _pop_to_mark(self) -> list[Any]:
        found: list[Any] = []
        while self.stack:
            value = self.stack.pop()
            if value is _Mark:
                return found[::-1]
            found.append(value)
        raise self._error("it takes values up to a mark that does not exist")

    # The actions of opcodes.

    def append(self, values: list[Any]) -> None:
        """Add values to the list on top."""
        target = self._top()
        if not isinstance(target, list):
            raise self._error("it appends to a value that is not a list")
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Add keys and values to the dict on top."""
        target = self._top()
        # An OrderedDict is created by a call, and filled afterwards.
        if isinstance(target, PickleCall):
            target.state = target.state or Pairs()
            target = target.state
        if not isinstance(target, Pairs) or len(values) % 2:
            raise self._error("it sets items of a value that is not a mapping")
        target.items.extend(zip(values[::2], values[1::2], strict=True))

    def name(self, module: Any, name: Any) -> None:
        """Push a global that unpickling would import."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise self._error("it asks for something without a name")
        found = PickleGlobal(module, name)
        if str(found) != _MEMBER and str(found) not in self.known:
            raise self._stranger(found)
        self.stack.append(found)

    def call(self, args: Any) -> None:
        """Push a call of the global on top of the stack."""
        of = self._pop()
        if not isinstance(of, PickleGlobal) or not isinstance(args, tuple):
            raise self._error("it calls a value that is not a global")
        if str(of) == _MEMBER:
            if [type(one) for one in args] != [PickleGlobal, str] or str(args[0]) == _MEMBER:
                raise self._stranger(of)
            of, args = args[0], args[1:]
        self.stack.append(PickleCall(of, args))

    def build(self) -> None:
        """Set the state of the object below the top of the stack."""
        state = self._pop()
        target = self._top()
        if not isinstance(target, PickleCall):
            raise self._error("it sets the state of a value that no call has made")
        target.state = state

    def _stranger(self, found: PickleGlobal) -> ConfigError:
        return ConfigError(
            f"the pickle asks for {shown(str(found))[1:-1]}, which is none of its format",
            where=self.where,
            accepted="numbers, texts, lists and mappings"
            + (f"; and names such as {', '.join(sorted(self.known)[-3:])}" * bool(self.known)),
            todo="do not open this file elsewhere: it may run what it asks for",
        )

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"this pickle cannot be read: {why}", where=self.where, todo=_TODO)


_VALUES = frozenset(
    {
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
        "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    }
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "MARK": _Mark}
_MAKE_EMPTY: Mapping[str, Callable[[], Any]] = {
    "EMPTY_LIST": list,
    "EMPTY_DICT": Pairs,
    "EMPTY_TUPLE": tuple,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

_ACTIONS: Mapping[str, Callable[[_Reader, Any], None]] = {
    "POP": lambda self, _: self._pop(),
    "TUPLE": lambda self, _: self.stack.append(tuple(self._pop_to_mark())),
    "LIST": lambda self, _: self.stack.append(self._pop_to_mark()),
    "APPEND": lambda self, _: self.append([self._pop()]),
    "APPENDS": lambda self, _: self.append(self._pop_to_mark()),
    "SETITEM": lambda self, _: self.set_items(self._pop_many(2)),
    "SETITEMS": lambda self, _: self.set_items(self._pop_to_mark()),
    "GLOBAL": lambda self, arg: self.name(*arg.split(" ", 1)),
    "STACK_GLOBAL": lambda self, _: self.name(*self._pop_many(2)),
    "REDUCE": lambda self, _: self.call(self._pop()),
    "NEWOBJ": lambda self, _: self.call(self._pop()),
    "BUILD": lambda self, _: self.build(),
    "BINPERSID": lambda self, _: self.stack.append(PersistentId(self._pop())),
}
