"""Describe a call of a PyTorch operator as the core's `OpCall`, and run operators by name.

An `OpCall` has the operator's name, its arguments and the types of its tensors. Rules derive from
it how the call may be sharded. This module knows no operator in particular.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from sbp_core.errors import SbpLookupError, SbpValueError
from sbp_core.graph import Argument, Ref, Symbol, TensorType, map_refs
from sbp_core.signatures import LocalCall, LocalProgram, OpCall
from sbp_torch._torch_compat import OpOverload, argument_types, in_schema_order
from sbp_torch.ops import random as _  # noqa: F401 - registers sbp.random_*

#: Runs an operator: (name, args, kwargs) -> outputs.
Execute = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]

_SYMBOLS = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def call_of(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, execute: Execute | None = None
) -> tuple[OpCall, tuple[torch.Tensor, ...]]:
    """Return the `OpCall` of a call, and its tensor arguments in argument order.

    Args:
        op: Operator and overload.
        args: Positional arguments; lists of tensors are allowed.
        kwargs: Arguments by name.
        execute: Runs the operator, to learn the types of its outputs.

    Raises:
        SbpLookupError: PyTorch has no such operator.
    """
    return describe(op, args, kwargs, tensors_of((execute or run_op)(op, args, kwargs)))


def describe(
    op: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[torch.Tensor]
) -> tuple[OpCall, tuple[torch.Tensor, ...]]:
    """Return the result of `call_of` for a call with known outputs, without running it.

    Arguments are put into the order of the operator's schema, as rules expect.
    """
    found = _find_overload(op)
    if found is not None:
        args, kwargs = in_schema_order(found, args, kwargs)
    tensors: list[torch.Tensor] = []

    def literal(value: Any) -> Argument:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return Ref(f"input{len(tensors) - 1}")
        if isinstance(value, list | tuple):
            return tuple(map(literal, value))
        for kind, name in _SYMBOLS.items():
            if isinstance(value, kind):
                return Symbol(name, str(value).removeprefix("torch."))
        return value

    literals = tuple(map(literal, args))
    named = {key: literal(value) for key, value in kwargs.items()}
    call = OpCall(
        op=op,
        args=literals,
        kwargs=named,
        inputs=tuple(map(type_of, tensors)),
        tensor_names=tuple(f"input{index}" for index in range(len(tensors))),
        outputs=tuple(map(type_of, outputs)),
        tags=tags_of(op),
        where=(f"op {op}",),
    )
    return call, tuple(tensors)


def abstract_call(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """Return the `OpCall` of a call whose tensors may be shapes; nothing is computed.

    Args:
        op: Operator and overload.
        args: Tensors, `TensorType`s or shapes (of float32) for tensors; other arguments unchanged.
        kwargs: Arguments by name.

    Raises:
        SbpLookupError: PyTorch has no such operator.
        SbpValueError: it does not take such arguments, or needs their data.
    """
    schema = argument_types(overload(op))
    kinds = list(schema.values())

    def meta(value: Any, kind: str) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to("meta")
        if isinstance(value, TensorType):
            return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
        if isinstance(value, list | tuple) and "Tensor" in kind:
            if "List" in kind:
                return [meta(part, "Tensor") for part in value]
            return torch.empty(tuple(value), device="meta")
        return value

    shapes = [meta(value, kind) for value, kind in zip(args, kinds, strict=False)]
    named = {key: meta(value, schema.get(key, "")) for key, value in kwargs.items()}
    if not any("Tensor" in entry for entry in kinds):
        named.setdefault("device", torch.device("meta"))
    try:
        return call_of(op, shapes, named)[0]
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise SbpValueError(
            f"{op} cannot be called like that: {line}",
            accepted=f"{op}({', '.join(f'{name}: {kind}' for name, kind in schema.items())})",
        ) from error


def made_up(entry: TensorType, draw: torch.Generator) -> torch.Tensor:
    """Return a tensor of a type with data that most operators accept, on the CPU.

    Real and complex elements are normal, booleans random, integers 0 or 1.
    """
    dtype: torch.dtype = getattr(torch, entry.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(entry.shape, dtype=wide, generator=draw).to(dtype)
    return torch.randint(2, entry.shape, generator=draw).to(dtype)


def random_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call with a made-up tensor for each `TensorType`; repeatable."""
    draw = torch.Generator().manual_seed(0)

    def filled(value: Any) -> Any:
        if isinstance(value, TensorType):
            return made_up(value, draw)
        return [filled(part) for part in value] if isinstance(value, list | tuple) else value

    return list(map(filled, args)), {key: filled(value) for key, value in kwargs.items()}


def overload(op: str) -> OpOverload:
    """Return PyTorch's operator of a name such as `aten.mm.default`.

    Raises:
        SbpLookupError: there is no such operator.
    """
    found = _find_overload(op)
    if found is None:
        raise SbpLookupError(
            f"PyTorch has no operator {op!r}",
            accepted="namespace.operator.overload, such as aten.mm.default",
        )
    return found


def _find_overload(op: str) -> OpOverload | None:
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, OpOverload) else None


def tags_of(op: str) -> tuple[str, ...]:
    """Return the tags of an operator that signatures need; none if PyTorch does not have it."""
    found = _find_overload(op)
    if found is None:
        return ()
    names = {str(tag).rsplit(".", maxsplit=1)[-1] for tag in found.tags}
    kept = {"pointwise": "pointwise", "nondeterministic_seeded": "seeded"}
    return tuple(tag for name, tag in kept.items() if name in names)


def run_op(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one of PyTorch's operators."""
    with torch.no_grad():
        return overload(op)(*args, **kwargs)


def run_program(
    program: LocalProgram, shards: Mapping[str, torch.Tensor], execute: Execute
) -> tuple[torch.Tensor, ...]:
    """Run the calls of a program one after the other and return its results.

    Args:
        program: The program of one rank.
        shards: Its input tensors by name; not changed.
        execute: Runs an operator.
    """
    known = dict(shards)
    made: tuple[torch.Tensor, ...] = ()
    for call in program.calls:
        args = [_value(map_refs(entry, lambda ref: known[ref.name])) for entry in call.args]
        kwargs = {
            key: _value(map_refs(entry, lambda ref: known[ref.name]))
            for key, entry in call.kwargs.items()
        }
        made = tensors_of(execute(call.op, args, kwargs))
        if call.outputs:
            known.update(zip(call.outputs, made, strict=True))
    return tuple(known[ref.name] for ref in program.results) if program.results else made


def program_of_call(call: OpCall) -> LocalProgram:
    """Return the program of one call: the call itself, with its own arguments."""
    return LocalProgram(calls=(LocalCall(op=call.op, args=call.args, kwargs=call.kwargs),))


def _value(argument: Argument) -> Any:
    """Return an argument in the form that torch takes."""
    if isinstance(argument, Symbol):
        kinds = {"device": torch.device}
        return kinds.get(argument.kind, partial(getattr, torch))(argument.name)
    if isinstance(argument, tuple):
        return [_value(part) for part in argument]
    return argument


def type_of(tensor: torch.Tensor) -> TensorType:
    """Return shape and dtype of a tensor."""
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def tensors_of(made: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs of an operator that are tensors, lists flattened."""
    if isinstance(made, torch.Tensor):
        return (made,)
    if isinstance(made, list | tuple):
        return tuple(tensor for entry in made for tensor in tensors_of(entry))
    return ()
