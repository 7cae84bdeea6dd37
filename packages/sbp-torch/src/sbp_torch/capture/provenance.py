"""The provenance of every traced op: its phase, module path, source line, forward op, checkpoint.

`Notes` is a dispatch mode, active while the user's step is traced. FX keeps its notes on the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_core.graph import Phase
from sbp_torch._torch_compat import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    annotated,
    checkpoints_inlined,
    current_backward_node,
    is_mutable,
    key_of_storage,
    last_forward_number,
    storage_key,
    written_arguments,
)
from sbp_torch.capture.constant_masks import chosen_by_constants, found_in_constants
from sbp_torch.capture.explicit_mutation import make_mutations_explicit
from sbp_torch.capture.functional import written_outside
from sbp_torch.capture.randomness import Draws
from sbp_torch.capture.sources import user_line

#: What autograd asks of every tensor that it meets.
_DEVICE = torch.ops.prim.device.default


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
        #: Storages of real tensors that were made on the way, by key; kept, so that keys are.
        self.made: dict[int, torch.UntypedStorage] = {}
        #: Which op has made a size that goes by values, and where, by the name of the size.
        self.sizes_by_value: dict[str, tuple[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # most calls by far, and none that is traced
        if kwargs and kwargs.get("generator") is not None:
            raise CaptureError(
                f"{func} draws from a generator of the program's own",
                where=user_line(),
                accepted="random numbers of PyTorch's default generator",
                todo="leave generator= out: the numbers follow from the seed of the run",
            )
        if is_mutable(func):
            self._check_written(func, args, kwargs or {})
        found = found_in_constants(func, args, kwargs or {})
        if found is not None:
            return found
        note = self._note()
        with annotated({"sbp": note}):
            func, args, kwargs = chosen_by_constants(func, args, kwargs or {})
            made = make_mutations_explicit(func, args, kwargs)
            if made is not None and self.checkpoint:
                raise _changed_twice("running statistics")
            if made is None:
                made = self.draws.call(func, args, kwargs)
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if type(tensor) is Tensor:
                storage = tensor.untyped_storage()
                self.made.setdefault(key_of_storage(storage), storage)
            elif isinstance(tensor, FakeTensor):
                sizes: Any = tensor.shape
                for size in sizes:
                    if not isinstance(size, int):
                        self.sizes_by_value.setdefault(str(size), (str(func), user_line()))
        return made

    def _check_written(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Refuse a write to a tensor that was there before: it would be changed here and now."""
        for tensor in written_arguments(func, args, kwargs):
            real = type(tensor) in (Tensor, nn.Parameter)
            if real and storage_key(tensor) not in self.made:
                raise written_outside(func, user_line())

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
    def _checkpointed(self, model: nn.Module) -> Iterator[None]:
        """Mark ops as what the user wants to be rematerialised in the backward phase.

        Raises:
            CaptureError: they change a buffer, which PyTorch would then change twice.
        """
        if self.checkpoint:  # one within another: the outer one decides
            yield
            return
        self.num_checkpoints += 1
        self.checkpoint = self.num_checkpoints
        before = {name: (value, value._version) for name, value in model.named_buffers()}
        try:
            yield
        finally:
            self.checkpoint = 0
        for name, value in model.named_buffers():
            old, version = before.get(name, (None, 0))
            if value is not old or value._version != version:
                raise _changed_twice(f"the buffer {name!r}")

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
            stack.enter_context(checkpoints_inlined(lambda: self._checkpointed(model)))
            yield


def _changed_twice(what: str) -> CaptureError:
    return CaptureError(
        f"what torch.utils.checkpoint runs changes {what}: PyTorch runs it again in the backward "
        "phase, and so makes each change twice",
        where=user_line(),
        accepted="checkpoints of modules that leave their buffers as they are",
        todo="leave the module out of the checkpoint, or leave checkpoint out and set "
        "compile.passes.recompute.modules, which changes buffers once",
    )
