"""Who knows how the results of operators lie in memory: the tensor library, by its plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import Instruction
from sbp_core.memory.storage_view import Number, ResultLayout, Value


class CallLayouts(Protocol):
    """Knows how the results of instructions lie, of any plan: `memory.layout.Layouts`."""

    def call(
        self,
        entry: Instruction,
        rank: int,
        read: Callable[[str], Value],
        steps: Sequence[BoxingStep] = (),
    ) -> tuple[ResultLayout | Number, ...]:
        """Return how each output lies.

        Args:
            entry: The instruction.
            rank: Who executes it.
            read: How the value of a key lies.
            steps: The boxing steps of the plan, which `sbp.local_box` names by index.
        """


class LayoutLibrary(Protocol):
    """Of a plugin of kind `tensor_library`: knows how results of operators lie in memory."""

    def call_layouts(self) -> CallLayouts:
        """Return what learns the layouts of calls, and remembers them from plan to plan."""
        ...
