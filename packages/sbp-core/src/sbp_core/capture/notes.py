"""Notes beside every traced op: its phase, module path, source line, forward op, and marks.

A dispatch mode that is active while the user's step is traced. FX keeps the notes on its nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from sbp_core._torch_compat import (
    TorchDispatchMode,
    annotated,
    checkpoints_inlined,
    current_backward_node,
    last_forward_number,
)
from sbp_core.capture.hidden import write_aloud
from sbp_core.capture.randomness import Draws
from sbp_core.capture.sources import user_line
from sbp_core.graph.ir import Phase


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Write a note beside every traced op, and make random ops count instead of drawing.

    Args:
        draws: Restates random ops.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.forward_ops: dict[int, list[dict[str, Any]]] = {}
        self.num_ops = 0
        self.num_checkpoints = 0
        self.checkpoint = 0
        self.draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note = self._note()
        with annotated({"sbp": note}):
            written = write_aloud(func, args, kwargs or {})
            return self.draws.call(func, args, kwargs or {}) if written is None else written

    def _note(self) -> dict[str, Any]:
        self.num_ops += 1
        note: dict[str, Any] = {"id": self.num_ops, "phase": self.phase.value}
        if self.phase is Phase.FORWARD:
            note |= {"module": self.modules[-1] if self.modules else "", "source": user_line()}
            if self.checkpoint:
                note["checkpoint"] = self.checkpoint
            self.forward_ops.setdefault(last_forward_number(), []).append(note)
        elif self.phase is Phase.BACKWARD:
            number = current_backward_node()
            origins = self.forward_ops.get(number, []) if number is not None else []
            if origins:
                note |= {key: origins[0][key] for key in ("module", "source")}
            note["forward"] = [origin["id"] for origin in origins]
        return note

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Mark ops as belonging to a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def _checkpointed(self) -> Iterator[None]:
        """Mark ops as what the user wants to be computed again in the backward phase."""
        if self.checkpoint:  # one within another: the outer one decides
            yield
            return
        self.num_checkpoints += 1
        self.checkpoint = self.num_checkpoints
        try:
            yield
        finally:
            self.checkpoint = 0

    @contextmanager
    def follow(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the module that is running, and of `torch.utils.checkpoint`."""

        def enter(path: str) -> Callable[..., None]:
            return lambda *_: self.modules.append(path)

        def leave(*_: Any) -> None:
            self.modules.pop()

        with ExitStack() as stack:
            for path, module in model.named_modules():
                handles = (
                    module.register_forward_pre_hook(enter(path)),
                    module.register_forward_hook(leave, always_call=True),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            stack.callback(self.modules.clear)
            stack.enter_context(checkpoints_inlined(self._checkpointed))
            yield
