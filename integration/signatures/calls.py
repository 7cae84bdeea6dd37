"""Tracing: record every ATen call of a variant, forward and gradient, with real tensors.

A variant is traced as a training step is captured (`make_fx`, then functionalisation), and the
graph is run on the real inputs. If tracing fails because the program depends on values, the program
itself is run under a dispatch mode instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sbp_core.signatures import call_key
from sbp_torch.signatures import describe, tensors_of
from signatures.variants import OTHER_DTYPES, Sample, Variant

FORWARD = "forward"
GRADIENT = "gradient"

#: The operator with which functionalisation writes back to inputs; a captured step returns the new
#: values instead.
_WRITE_BACK = "aten.copy_.default"

#: A call with more elements than this is not recorded; see `Recording.left_out`.
_MOST_ELEMENTS = 300_000


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One ATen call with its real tensors.

    Args:
        op: `aten.mm.default`.
        args, kwargs: Its arguments.
        key: Text that is equal for equivalent calls.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: str


@dataclass(frozen=True, slots=True, order=True)
class Use:
    """The origin of a call: `forward` of a variant in a dtype, or its `gradient`."""

    variant: str
    dtype: str
    ground: str


@dataclass(slots=True)
class Recording:
    """The calls of the samples of a variant.

    Args:
        calls: The calls by key, with their uses.
        left_out: Why calls of some ground are missing: (variant, ground) -> reason.
    """

    calls: dict[str, tuple[RecordedCall, set[Use]]] = field(default_factory=dict)
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, call: RecordedCall, use: Use) -> None:
        """Add a call, once."""
        self.calls.setdefault(call.key, (call, set()))[1].add(use)

    def update(self, other: Recording) -> None:
        """Add the calls of another recording."""
        for key, (call, uses) in other.calls.items():
            self.calls.setdefault(key, (call, set()))[1].update(uses)
        self.left_out.update(other.left_out)


class _Calls:
    """Runs calls and records them."""

    def __init__(self) -> None:
        self.found: dict[str, RecordedCall] = {}
        self.problems: list[str] = []

    def make(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a call, and keep it."""
        kept_args, kept_kwargs = tree_map(_copied, (tuple(args), dict(kwargs)))
        made = op(*args, **kwargs)
        if "empty" in str(op):
            # Uninitialized memory may contain infinities or NaN.
            for leaf in tree_leaves(made):
                leaf.zero_()
        if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(made)):
            return made
        leaves = [leaf for leaf in tree_leaves((args, kwargs, made)) if _is_tensor(leaf)]
        if str(op) == _WRITE_BACK:
            return made
        if op._schema.is_mutable:
            self.problems.append(f"calls {op}, which mutates its argument")
        elif any(leaf.is_sparse or leaf.layout != torch.strided for leaf in leaves):
            self.problems.append(f"{op} is given or makes sparse tensors")
        elif sum(leaf.numel() for leaf in leaves) > _MOST_ELEMENTS:
            self.problems.append(f"a sample of {op} is too large")
        elif "as_strided" in str(op) and not _runs(op, kept_args, kept_kwargs):
            self.problems.append(f"{op} reads memory around its argument")
        else:
            call, _ = describe(str(op), kept_args, kept_kwargs, tensors_of(made))
            key = call_key(call)
            self.found.setdefault(key, RecordedCall(str(op), kept_args, kept_kwargs, key))
        return made


def _runs(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call runs on contiguous copies of its tensors."""
    try:
        op(*args, **kwargs)
    except RuntimeError:
        return False
    return True


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _copied(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    plain = leaf.detach().resolve_conj().resolve_neg()
    return plain.clone(memory_format=torch.contiguous_format)


class _Run(Interpreter):
    """Runs a graph and records its calls."""

    def __init__(self, graph: GraphModule, calls: _Calls) -> None:
        super().__init__(graph)
        self.calls = calls

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            return self.calls.make(target, args, kwargs)
        return super().call_function(target, args, kwargs)


class _Watch(TorchDispatchMode):
    """Records the calls of a program while it runs."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self.calls.make(func, args, kwargs or {})


class _Program:
    """One sample as functions of its tensors."""

    def __init__(self, variant: Variant, sample: Sample) -> None:
        self.variant = variant
        self.sample = sample
        self.leaves, self.structure = tree_flatten((sample.args, sample.kwargs))
        self.places = [at for at, leaf in enumerate(self.leaves) if _is_tensor(leaf)]
        self.tensors = [self.leaves[at].detach() for at in self.places]
        self.needs = [self.leaves[at].requires_grad for at in self.places]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the results of the operator."""
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        args, kwargs = tree_unflatten(leaves, self.structure)
        return self.variant.run(*args, **kwargs)

    def _differentiable(self, tensors: Sequence[torch.Tensor]) -> Any:
        given = [
            tensor.detach().requires_grad_(need)
            for tensor, need in zip(tensors, self.needs, strict=True)
        ]
        made = self.sample.finish(self.forward(*given))
        return given, [
            leaf for leaf in tree_leaves(made) if _is_tensor(leaf) and leaf.requires_grad
        ]

    def cotangents(self) -> list[torch.Tensor]:
        """Return random gradients of differentiable outputs; [] if there are none."""
        if not any(self.needs):
            return []
        return [torch.randn_like(leaf.detach()) for leaf in self._differentiable(self.tensors)[1]]

    def step(self, *tensors: torch.Tensor) -> Any:
        """Return outputs and gradients, of inputs followed by cotangents."""
        count = len(self.places)
        given, made = self._differentiable(tensors[:count])
        wanted = [tensor for tensor in given if tensor.requires_grad]
        gradients = torch.autograd.grad(made, wanted, list(tensors[count:]), allow_unused=True)
        return made, [gradient for gradient in gradients if gradient is not None]


def _recorded(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> _Calls:
    """Trace a function and return the calls that it makes on real tensors."""
    calls = _Calls()
    try:
        first = make_fx(function)(*tensors)
        functional = torch.func.functionalize(first, remove="mutations")
        graph = make_fx(functional)(*tensors)
        with torch.no_grad():
            _Run(graph, calls).run(*tensors)
    except Exception:  # tracing fails, for example because of a branch on values
        calls = _watched(function, tensors)
    return calls


def _watched(function: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> _Calls:
    """Run a function and return its calls: functionalised if possible."""
    for program in (torch.func.functionalize(function, remove="mutations"), function):
        calls = _Calls()
        try:
            with _Watch(calls):
                program(*tensors)
        except Exception:
            if program is function:
                raise
        else:
            break
    return calls


def record(variant: Variant, count: int, wanted: Sequence[torch.dtype]) -> Recording:
    """Return the calls of up to `count` samples of a variant; fewer in all but its first dtype."""
    made = Recording()
    dtypes = [dtype for dtype in variant.dtypes if dtype in (*wanted, *OTHER_DTYPES)]
    if not dtypes:
        made.left_out[variant.name, FORWARD] = "supports none of the dtypes on a CPU"
    for dtype in dtypes:
        torch.manual_seed(0)
        try:
            samples = variant.chosen(dtype, count if dtype == dtypes[0] else max(count // 2, 1))
        except Exception as error:
            made.left_out[variant.name, FORWARD] = _line(error)
            continue
        for sample in samples:
            _record_sample(variant, sample, str(dtype).removeprefix("torch."), made)
    return made


def _record_sample(variant: Variant, sample: Sample, dtype: str, made: Recording) -> None:
    program = _Program(variant, sample)
    known: set[str] = set()
    for ground, calls in _grounds(program, made):
        if calls.problems:
            made.left_out[variant.name, ground] = calls.problems[0]
        for key, call in calls.found.items():
            if key not in known:
                made.add(call, Use(variant.name, dtype, ground))
        known |= set(calls.found)


def _grounds(program: _Program, made: Recording) -> Iterator[tuple[str, _Calls]]:
    """Yield the calls of the forward, then the calls of forward and gradient together."""
    name = program.variant.name
    try:
        if program.variant.direct:
            calls = _Calls()
            calls.make(program.variant.run, *_direct(program))
            yield FORWARD, calls
        else:
            yield FORWARD, _recorded(program.forward, program.tensors)
    except Exception as error:
        made.left_out[name, FORWARD] = _line(error)
        return
    try:
        with torch.autograd.set_multithreading_enabled(False):
            cotangents = program.cotangents()
            if cotangents:
                yield GRADIENT, _recorded(program.step, [*program.tensors, *cotangents])
    except Exception as error:
        made.left_out[name, GRADIENT] = _line(error)


def _direct(program: _Program) -> tuple[Sequence[Any], dict[str, Any]]:
    leaves = [leaf.detach() if _is_tensor(leaf) else leaf for leaf in program.leaves]
    args, kwargs = tree_unflatten(leaves, program.structure)
    return args, kwargs


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:160]}".splitlines()[0]
