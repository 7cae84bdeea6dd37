"""Pass each operator call of a thread to a function, for `MemoryMeter` and `BadValueWatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves

from sbp_torch._torch_compat import OpOverload, TorchDispatchMode

#: Takes an operator that was called, its arguments and its results, both as flat lists.
Look = Callable[[OpOverload, Sequence[Any], Sequence[Any]], None]


class OperatorCalls(TorchDispatchMode):  # type: ignore[no-untyped-call] # of torch, without types
    """A context that passes every operator call to a function, after the call has returned.

    Args:
        look: The function. Operators that it calls itself are not passed to it.
    """

    def __init__(self, look: Look) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # likewise
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._look(func, tree_leaves((args, kwargs)), tree_leaves(made))
        return made
