"""The `state` of an optimizer, whose states live on ranks."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import ConfigError
from sbp_torch._torch_compat import as_plain_tensors
from sbp_torch.guards.connected import as_before, connect, disconnect


class OptimizerStates(defaultdict[Any, Any]):
    """The `state` of an optimizer, read from a step when it is asked for.

    Args:
        optimizer: Whose.
        read: Has `take` called with what the states are behind the last step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, read: Callable[[], None]) -> None:
        super().__init__(dict)
        self.optimizer, self._read = optimizer, read
        self.is_behind = self._is_apart = self._is_touched = False
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
        for tensor in self._tensors():
            disconnect(tensor)
        if self.is_in_place:
            self._before.clear()
            self._before.update(dict.items(self))
            self.optimizer.state = self._before

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let it be an ordinary mapping of ordinary tensors meanwhile, as they are."""
        before, self._is_apart = self._is_apart, True
        try:
            with as_before([*self._tensors()]):
                yield
        finally:
            self._is_apart = before

    def _tensors(self) -> Iterator[Tensor]:
        for held in dict.values(self.optimizer.state):
            yield from (one for one in held.values() if isinstance(one, Tensor))

    def asked_for(self, tensor: Any, *, untraced: bool) -> None:
        """See `Owner.asked_for`."""
        self.ask()
        self._is_touched |= untraced

    def let_go(self, has_states: bool) -> None:
        """See `Owner.let_go`: states go on with their optimizer.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a state of an optimizer that a parallel step has is no constant")

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
            own = dict.setdefault(self, members[number], {})
            for key, value in held.items():
                _put(own, key, value)  # in place: somebody may hold what was there
        self.is_behind = False
        self._note()

    def _entries(self) -> dict[tuple[int, Any], tuple[Any, int]]:
        return {
            (id(parameter), key): (value, version_of(value))
            for parameter, held in dict.items(self.optimizer.state)
            for key, value in held.items()
        }

    def _note(self) -> None:
        self._is_touched = False
        with as_plain_tensors():
            for tensor in self._tensors():
                if type(tensor) is Tensor:
                    connect(tensor, self, "a state of the optimizer")
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
        with as_plain_tensors():
            now, known = self._entries(), self._known
        if self._is_touched:
            return True
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


def _put(held: dict[Any, Any], key: Any, value: Any) -> None:
    """Let an entry have a value: in the tensor that is there, if it fits."""
    before = held.get(key)
    if not isinstance(before, Tensor) or not isinstance(value, Tensor):
        held[key] = value
        return
    with torch.no_grad(), as_plain_tensors():
        if (before.shape, before.dtype, before.device) == (value.shape, value.dtype, value.device):
            before.data.copy_(value)
        else:
            held[key] = value


def version_of(value: Any) -> int:
    """Return how often a tensor was written; -1 of others, and of those that nobody counts."""
    if not isinstance(value, Tensor) or value.is_inference():
        return -1
    return value._version


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
