"""Record the provenance of every traced op, and replace some ops.

`Notes` is a dispatch mode, active while the user's step is traced. It attaches the phase, module
path, source line, forward op and checkpoint of each op to the node, where FX keeps them. Random ops
become counter-based (`randomness`), and two kinds of ops are replaced.

The first kind writes to arguments although the schema does not declare it, and functionalisation
relies on schemas:

before: y, m, r = native_batch_norm(x, w, b, mean, var, training)      writes mean and var
after:  y, m, r, mean', var' = _native_batch_norm_legit_functional(..); mean.copy_(mean'); ...

The second kind selects by a mask that depends only on sizes, so its shape is known at capture:

before: aten.index.Tensor(x, [mask])      mask = ~torch.eye(3, dtype=torch.bool): a shape by value
after:  rows, columns = aten.nonzero_static(mask, size=6).unbind(1)
        aten.index.Tensor(x, [rows, columns])

Such masks are real tensors in a trace, so the selected elements can be counted. Not replaced are
masks without values in a trace: those that depend on the batch or on a state, and those made of
tensors of more than 4 MiB (`_torch_compat.fake_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sbp_core.errors import CaptureError
from sbp_core.graph import Phase
from sbp_torch._torch_compat import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    annotated,
    checkpoints_inlined,
    current_backward_node,
    key_of_storage,
    last_forward_number,
    storage_key,
    without_modes,
    written_arguments,
)
from sbp_torch.graph_capture.diagnostics import user_line, written_outside
from sbp_torch.graph_capture.randomness import Draws

_aten = torch.ops.aten

#: Operators whose second argument is a list of indices, some of which may be masks.
_BY_INDICES = (
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._unsafe_index_put.default,
    _aten._index_put_impl_.default,
)

#: Operators that find positions: capture counts them, and each step finds them.
_COUNTED = (_aten.index.Tensor, _aten.masked_select.default, _aten.nonzero.default)


def chosen_by_constants(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[OpOverload, Sequence[Any], Mapping[str, Any]]:
    """Return an equal call with a known output shape, if a mask has values."""
    if func is _aten.masked_select.default and _is_constant(args[1]):
        value, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call] # torch's
        func, args = _aten.index.Tensor, (value, [mask])
    if func is _aten.nonzero.default and _is_constant(args[0]):
        return _aten.nonzero_static.default, args, {"size": _count(args[0])}
    if func not in _BY_INDICES or not any(map(_is_mask, args[1])):
        return func, args, kwargs
    indices: list[Tensor | None] = []
    for one in args[1]:
        if not _is_mask(one):
            indices.append(one)
        elif args[0].shape[len(indices) :][: one.dim()] == one.shape:
            indices += _aten.nonzero_static.default(one, size=_count(one)).unbind(1)
        else:  # PyTorch's own error, which it does not raise for all operators here
            raise IndexError(
                f"the shape of the mask {[*one.shape]} at index {len(indices)} does not match the "
                f"shape of the indexed tensor {[*args[0].shape]}"
            )
    return func, (args[0], indices, *args[2:]), kwargs


def found_in_constants(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the result of an operator if it is a constant of the graph; else None."""
    if torch.Tag.dynamic_output_shape not in func.tags or func in _COUNTED:
        return None
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if not given or not all(map(_is_constant, given)):
        return None
    with without_modes():
        return func(*args, **kwargs)


def _is_constant(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _is_mask(value: Any) -> bool:
    masks = (torch.bool, torch.uint8)
    return _is_constant(value) and value.dtype in masks and value.dim() > 0


def _count(mask: Tensor) -> int:
    with without_modes():
        return int(mask.count_nonzero())


def make_mutations_explicit(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with hidden writes as `copy_`; None if its schema declares all writes."""
    if func is not _aten.native_batch_norm.default or kwargs:
        return None
    _, _, _, mean, var, training, *_ = args
    if not training or not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return None
    *made, new_mean, new_var = _aten._native_batch_norm_legit_functional.default(*args)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(made)


#: The operator that autograd calls on every tensor.
_DEVICE = torch.ops.prim.device.default


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Attaches a note to every traced op, and replaces random ops and the two kinds above."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.forward_ops: dict[int, list[dict[str, Any]]] = {}
        self.num_ops = 0
        self.num_checkpoints = 0
        self.checkpoint = 0
        self.draws = draws
        #: Storages of real tensors that the trace made, by key; kept alive, so keys stay valid.
        self.made: dict[int, torch.UntypedStorage] = {}
        #: By the name of a size that depends on values: the op that made it, and its line.
        self.sizes_by_value: dict[str, tuple[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device  # the most frequent call, which is never traced
        if kwargs and kwargs.get("generator") is not None:
            raise CaptureError(
                f"{func} draws from a generator of the program's own",
                where=user_line(),
                accepted="random numbers of PyTorch's default generator",
                todo="leave generator= out: the numbers follow from the seed of the run",
            )
        for tensor in written_arguments(func, args, kwargs or {}):
            # The write would change an existing tensor during the trace.
            real = type(tensor) in (Tensor, nn.Parameter)
            if real and storage_key(tensor) not in self.made:
                raise written_outside(func, user_line())
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
        """Mark ops that the user wants to rematerialise in the backward phase.

        Raises:
            CaptureError: the ops change a buffer, which PyTorch would then change twice.
        """
        if self.checkpoint:  # nested checkpoints: the outer one decides
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
        """Track the module that is running, and uses of `torch.utils.checkpoint`."""

        def enter(path: str) -> Callable[..., None]:
            return lambda *_: self.modules.append(path)

        def leave(*_: Any) -> None:
            self.modules.pop()

        with ExitStack() as stack:
            for path, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(enter(path)).remove)
                handle = module.register_forward_hook(leave, always_call=True)
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
