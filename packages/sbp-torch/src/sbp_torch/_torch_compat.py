"""The private parts of PyTorch that we use, each behind a function or name of our own.

`_torch_optim_compat` has the private parts of its optimizers. `_torch_patches` has the private
parts that we replace for a while.

Each public function names the versions it was tried on. Elsewhere in the package, private are only
`torch.utils._pytree`, `torch._dynamo`, some operators of ATen, and a few attributes (`_version`,
`_schema`, hooks of tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import fx
from torch._C._autograd import _get_sequence_nr
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload as OpOverload
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils import stateless
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from sbp_torch._torch_patches import (
    frames_told_apart_by_folder,
    grouped_products_of_any_dtype,
    replaced,
    unlogged_failures,
)


def fake_mode() -> _FakeMode:
    """Return a mode of tensors without data, with static shapes. Tried on 2.13.

    PyTorch refuses `_ctc_loss` there if lengths are tensors; see `_ctc_loss_shapes`. It has no fake
    kernels of some fused updates, and would run the real ones on zeros as large as the parameters.
    """
    op_implementations_dict.setdefault(torch.ops.aten._ctc_loss.Tensor, _ctc_loss_shapes)
    for update in ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"):
        operator = getattr(torch.ops.aten, update)
        for overload in (operator.default, operator.tensor_lr):
            op_implementations_dict.setdefault(overload, _changes_no_shape)
    return _FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


#: A tensor of more bytes is traced without data even if it depends on no input. A contrastive loss
#: makes tensors of this size: the positions of all pairs of 512 views.
_LARGE_BYTES = 2**22


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """A mode of tensors without data that can leave small tensors alone. Tried on 2.13."""

    _tracing_depth = 0

    @contextmanager
    def only_large(self) -> Iterator[None]:
        """Compute tensors that depend on no input as fake tensors only if they are large.

        Large ones are, for example, causal masks, batch x time x time, made of `arange`s: the trace
        does not depend on their values. Small ones are real tensors, so that NumPy can read them.
        """
        before, self._tracing_depth = self._tracing_depth, len(self.enter_stack) + 1
        try:
            with self:
                yield
        finally:
            self._tracing_depth = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # The tracer asks for fake tensors by entering this mode once more.
        if len(self.enter_stack) != self._tracing_depth:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if any(isinstance(one, FakeTensor) for one in args) or any(
            isinstance(one, FakeTensor) for one in tree_leaves((args, kwargs))
        ):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if is_mutable(func):  # what is written to is there already
            return func(*args, **kwargs)
        try:
            with self:
                made = func(*args, **kwargs)
        except Exception:  # it depends on values, which the real tensors have
            return func(*args, **kwargs)
        fakes = [one for one in tree_leaves(made) if isinstance(one, FakeTensor)]
        is_large = any(one.untyped_storage().nbytes() > _LARGE_BYTES for one in fakes)
        return made if is_large else func(*args, **kwargs)


def trace_graph(
    function: Callable[..., Any], mode: _FakeMode, inputs: Sequence[Any]
) -> fx.GraphModule:
    """Trace a Python function on fake tensors to ATen, autograd and mutations included.

    Tried on 2.13.
    """
    with (
        torch.autograd.set_multithreading_enabled(False),
        tracing(TracingContext(mode)),
        fx_traceback.preserve_node_meta(),
        grouped_products_of_any_dtype(),
        unlogged_failures(),
        frames_told_apart_by_folder(),
        mode.only_large(),
    ):
        module: fx.GraphModule = make_fx(function)(*inputs)
    return module


def functional_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """Trace a function again without mutations, keeping views. Tried on 2.13."""
    functional = torch.func.functionalize(function, remove="mutations")
    modes = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    mode = next((mode for mode in modes if isinstance(mode, _FakeMode)), None) or fake_mode()
    with (
        fx_traceback.preserve_node_meta(),
        grouped_products_of_any_dtype(),
        mode.only_large(),
    ):
        module: fx.GraphModule = make_fx(functional)(*inputs)
    return module


def _ctc_loss_shapes(
    mode: FakeTensorMode,
    func: OpOverload,
    scores: torch.Tensor,
    targets: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fake results of `_ctc_loss` for lengths that are tensors.

    Its second output is as wide as the longest target needs; here, as wide as one may need.
    """
    if targets.dim() != 2:  # in one row: the length of the longest target depends on values
        raise DynamicOutputShapeException(func)
    times, samples = scores.shape[:2]
    with mode:
        wide = scores.new_empty((samples, times, 2 * targets.shape[1] + 1))
        return scores.new_empty((samples,)), wide


def _changes_no_shape(mode: FakeTensorMode, func: OpOverload, *_: Any, **__: Any) -> None:
    """Return the fake result of an update in place, which is nothing."""


def annotated(note: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Attach a note to every FX node made inside, as `node.meta["custom"]`. Tried on 2.13."""
    found: AbstractContextManager[None] = fx_traceback.annotate(dict(note))
    return found


def reparametrized(
    module: torch.nn.Module, tensors: dict[str, torch.Tensor]
) -> AbstractContextManager[None]:
    """Swap a module's parameters and buffers, tied ones too. Tried on 2.13.

    Args:
        module: Gets its own tensors back at the end.
        tensors: By name. At the end, the tensors that the module then held: it may assign new ones.
    """
    return stateless._reparametrize_module(module, tensors, tie_weights=True)


@contextmanager
def own_kernels_only() -> Iterator[None]:
    """Let layers call ATen's own operators instead of oneDNN's on the CPU.

    oneDNN's operators for recurrent layers can be traced, but not run. Tried on 2.13.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def without_modes() -> AbstractContextManager[Any]:
    """Run operators without the dispatch modes that are active. Tried on 2.13."""
    return _disable_current_modes()


def gradient_hooks(
    parameter: torch.Tensor,
) -> tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]:
    """Return a parameter's gradient hooks and its post-accumulate hooks. Tried on 2.13."""
    after = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return tuple((parameter._backward_hooks or {}).values()), tuple((after or {}).values())


def is_tracing() -> bool:
    """Whether operators are being traced into a graph. Tried on 2.13."""
    return get_proxy_mode() is not None


def compiling() -> AbstractContextManager[None]:
    """Let `torch.compiler.is_compiling()` return True. Tried on 2.13."""
    return replaced(torch.compiler, _is_compiling_flag=True)


def checkpoints_inlined(
    region: Callable[[], AbstractContextManager[None]],
) -> AbstractContextManager[None]:
    """Let `torch.utils.checkpoint` run its function once, within `region()`. Tried on 2.13."""

    def without_reentrant(
        fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Generator[None, None, None]:
        with region():
            yield

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region():
                return function(*args)

    return replaced(
        checkpoint,
        _checkpoint_without_reentrant_generator=without_reentrant,
        CheckpointFunction=Reentrant,
    )


def last_forward_number() -> int:
    """Return the sequence number of the newest autograd node. Tried on 2.13."""
    return int(_get_sequence_nr()) - 1


def current_backward_node() -> int | None:
    """Return the sequence number of the autograd node that runs now, if any. Tried on 2.13."""
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def is_mutable(op: OpOverload) -> bool:
    """Whether an operator writes to its arguments. Tried on 2.13."""
    return bool(op._schema.is_mutable)


def written_argument(op: OpOverload) -> int | None:
    """Return the index of the one argument that an op writes to; None if it is not that simple.

    Tried on 2.13.
    """
    places = [
        at
        for at, entry in enumerate(op._schema.arguments)
        if entry.alias_info is not None and entry.alias_info.is_write
    ]
    if len(places) != 1 or len(op._schema.returns) != 1:
        return None
    entry = op._schema.arguments[places[0]]
    return None if entry.kwarg_only or str(entry.type) != "Tensor" else places[0]


def functional_overload(op: OpOverload) -> OpOverload | None:
    """Return the functional op of an in-place one: `add` for `add_`; None if there is none.

    Tried on 2.13.
    """
    namespace, _, name = op._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    found = getattr(packet, op._overloadname, None) if name.endswith("_") else None
    if not isinstance(found, OpOverload) or is_mutable(found):
        return None
    own, other = (
        [(entry.name, str(entry.type)) for entry in each._schema.arguments] for each in (op, found)
    )
    return found if own == other else None


def view_source(node: fx.Node) -> fx.Node | None:
    """Return the argument of which a node's result is a view, if any. Tried on 2.13."""
    target: Any = node.target
    if not isinstance(target, OpOverload):
        source = node.args[0] if node.args else None  # a part of a list of results
        return source if node.op == "call_function" and isinstance(source, fx.Node) else None
    if any(entry.alias_info is not None for entry in target._schema.returns):
        for argument, entry in zip(node.args, target._schema.arguments, strict=False):
            if entry.alias_info is not None and isinstance(argument, fx.Node):
                return argument
    return None


def argument_types(op: OpOverload) -> dict[str, str]:
    """Return the type of each argument by name, in order: `Tensor`, `List[Tensor]`, `int`, ...

    Tried on 2.13.
    """
    return {entry.name: str(entry.type) for entry in op._schema.arguments}


def in_schema_order(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call as the dispatcher passes them on: the same call.

    Positional arguments come first, up to the last one that is given, with defaults in between.
    Keyword-only arguments follow by name, in the order of the schema. Tried on 2.13.
    """
    rest, ordered = dict(kwargs), list(args)
    listed = op._schema.arguments
    placed = [entry for entry in listed if not entry.kwarg_only]
    last = max((at for at, entry in enumerate(placed) if entry.name in rest), default=-1)
    for entry in placed[len(ordered) : last + 1]:
        ordered.append(rest.pop(entry.name) if entry.name in rest else entry.default_value)
    named = {entry.name: rest.pop(entry.name) for entry in listed if entry.name in rest}
    return ordered, named | rest


def return_types(op: OpOverload) -> list[str]:
    """Return the type of each result, in order. Tried on 2.13."""
    return [str(entry.type) for entry in op._schema.returns]


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive. Tried on 2.13."""
    return key_of_storage(tensor.untyped_storage())


def key_of_storage(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies a storage while it is alive. Tried on 2.13."""
    return int(storage._cdata)


def new_storage(size_bytes: int, device: str = "cpu") -> torch.UntypedStorage:
    """Return a new storage, not initialized. Tried on 2.13."""
    make: Callable[..., torch.UntypedStorage] = torch.UntypedStorage
    return make(size_bytes, device=device)


def copied_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a copy of a storage. Tried on 2.13."""
    copied: Callable[[], torch.UntypedStorage] = storage.clone
    return copied()


def base_name(op: Callable[..., Any]) -> str:
    """Return the name of an operator without its overload; "" for functions. Tried on 2.13."""
    return str(op._opname) if isinstance(op, OpOverload) else ""


def compile_graph(
    module: fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[..., Sequence[Any]]:
    """Compile a traced graph with Inductor for its traced shapes and strides. Tried on 2.13."""
    from torch._inductor import standalone_compile

    with torch.no_grad():
        compiled: Callable[..., Sequence[Any]] = standalone_compile(
            module, list(inputs), dynamic_shapes="from_graph"
        )
    return compiled


def cpp_compiler_problem() -> str:
    """Return why Inductor cannot compile for CPUs here; empty if it can. Tried on 2.13."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def written_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type = torch.Tensor
) -> list[Any]:
    """Return the tensors among the arguments of a call that it writes to. Tried on 2.13.

    Args:
        op: The operator.
        args: By position.
        kwargs: By name.
        kind: The type that stands for a tensor: `Tensor` itself, or a node of a graph.
    """
    found: list[Any] = []
    for at, entry in enumerate(op._schema.arguments):
        if entry.alias_info is None or not entry.alias_info.is_write:
            continue
        value = args[at] if at < len(args) else kwargs.get(entry.name)
        values = value if isinstance(value, list | tuple) else [value]
        found += [tensor for tensor in values if isinstance(tensor, kind)]
    return found


def without_torch_functions() -> AbstractContextManager[None]:
    """Call no `__torch_function__`, neither of subclasses nor of modes. Tried on 2.13."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return found


def as_plain_tensors() -> AbstractContextManager[None]:
    """Handle subclasses of tensors as tensors; modes are still called. Tried on 2.13."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found


def trunc_normal_as(
    wrapped: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]],
) -> AbstractContextManager[None]:
    """Replace the function with which `torch.nn.init.trunc_normal_` fills. Tried on 2.13."""
    init = torch.nn.init
    return replaced(init, _no_grad_trunc_normal_=wrapped(init._no_grad_trunc_normal_))
