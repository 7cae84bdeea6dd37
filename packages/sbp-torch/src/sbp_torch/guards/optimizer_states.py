"""The `state` of an optimizer, whose states live on ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OptimizerStates(defaultdict[Any, Any]):
    """The `state` of an optimizer, read from a step when it is asked for.

    Args:
        optimizer: Whose.
        read: Has `take` called with what the states are behind the last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, read: Callable[[], None]) -> None:
        super().__init__(dict)
        self.optimizer, self._read = optimizer, read
        self.is_behind = self._is_apart = False
        self._before: Any = optimizer.state
        self._known: dict[tuple[int, Any], tuple[Any, int]] = {}

    def connect(self) -> None:
        """Begin: what the optimizer has is what the step has."""
        self._before = self.optimizer.state
        dict.update(self, self._before)
        self.optimizer.state = self
        self._note()

    def disconnect(self) -> None:
        """End: the optimizer keeps what it has, in an ordinary mapping."""
        if self.is_in_place:
            self._before.clear()
            self._before.update(dict.items(self))
            self.optimizer.state = self._before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let it be an ordinary mapping meanwhile, with the states that it has."""
        before, self._is_apart = self._is_apart, True
        try:
            yield
        finally:
            self._is_apart = before

    def ask(self) -> None:
        """Read the states, if they are asked for by somebody else than what reads them."""
        if self.is_behind and not self._is_apart:
            self._read()

    def take(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Take states by the number of their parameter, as `state_dict()` has them.

        Those that the step does not have, of parameters that are frozen, stay.
        """
        members = [one for group in self.optimizer.param_groups for one in group["params"]]
        for number, held in states.items():
            before = dict.get(self, members[number], {})
            dict.__setitem__(self, members[number], {**before, **held})
        self.is_behind = False
        self._note()

    def _entries(self) -> dict[tuple[int, Any], tuple[Any, int]]:
        return {
            (id(parameter), key): (value, value._version if isinstance(value, Tensor) else 0)
            for parameter, held in dict.items(self.optimizer.state)
            for key, value in held.items()
        }

    def _note(self) -> None:
        self._known = self._entries()

    @property
    def is_in_place(self) -> bool:
        """Whether the optimizer still asks here for its states."""
        return self.optimizer.state is self

    def is_written(self) -> bool:
        """Whether somebody has changed what was read, or put other states in its place."""
        if not self.is_in_place:
            return True
        if self.is_behind:  # nobody has asked since
            return False
        now, known = self._entries(), self._known
        return now.keys() != known.keys() or any(
            value is not known[key][0] or version != known[key][1]
            for key, (value, version) in now.items()
        )

    def taken_over(self) -> None:
        """Go on with what the optimizer has now."""
        if not self.is_in_place:
            dict.clear(self)
            self.connect()
        self.is_behind = False
        self._note()

    def __reduce__(self) -> Any:
        self.ask()
        return defaultdict, (dict,), None, None, iter([*dict.items(self)])


def _asking(name: str) -> Any:
    original = getattr(defaultdict, name)

    @functools.wraps(original)
    def method(self: OptimizerStates, *args: Any, **kwargs: Any) -> Any:
        self.ask()
        return original(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__iter__", "__len__", "__repr__"),
    *("__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem", "setdefault"),
    *("update", "values"),
):
    setattr(OptimizerStates, _name, _asking(_name))
