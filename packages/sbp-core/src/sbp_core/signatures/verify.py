"""Verification by execution: cut a real call as a signature says, run every rank, compare.

Knows torch, and is the only module of `signatures` that does. The whole call is the oracle. Partial
inputs are cut into random summands (or into values below or above the maximum or minimum), so that
an operator which is not linear cannot pass by chance. Only signatures that the rules claim are run:
kernels fed with shards that do not fit each other may corrupt memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sbp_core._torch_compat import OpOverload, argument_types
from sbp_core.errors import SbpError, SbpLookupError
from sbp_core.graph.ir import Argument, Ref, Symbol, TensorType, map_refs
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Partial, Split, local_shape, split_bounds
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derive import combine, derive, enumerate_signatures
from sbp_core.signatures.localize import localize
from sbp_core.signatures.registry import Registry
from sbp_core.strategy import Signature

#: Runs an operator: (name, args, kwargs) -> outputs.
Execute = Callable[[str, Sequence[Any], Mapping[str, Any]], Any]

#: How many signatures of a 2-D mesh are tried.
_NUM_PRODUCTS = 12

#: Relative and absolute tolerance by dtype; integers and booleans have to be equal.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}

_SYMBOLS = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A claimed signature that execution refutes."""

    signature: Signature
    mesh_shape: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return f"{self.signature} on mesh {self.mesh_shape}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What execution says of the signatures of one call.

    Args:
        op: The operator.
        claimed: Every (mesh shape, signature) that was run.
        wrong: Those that execution refutes.
    """

    op: str
    claimed: tuple[tuple[tuple[int, ...], Signature], ...]
    wrong: tuple[Wrong, ...]

    @property
    def ok(self) -> bool:
        """Whether something was claimed and nothing was wrong."""
        return bool(self.claimed) and not self.wrong

    def __str__(self) -> str:
        head = f"{self.op}: {len(self.claimed)} signatures run, {len(self.wrong)} wrong"
        return "\n  ".join([head, *map(str, self.wrong)])


def verify(
    op: str,
    *args: Any,
    axis_sizes: Sequence[int] = (2, 3),
    rules: Registry | None = None,
    execute: Execute | None = None,
    **kwargs: Any,
) -> VerifyReport:
    """Run every signature of a call on every axis size, and a sample of those on 2-D meshes.

    Args:
        op: Operator and overload, such as `aten.mm.default`.
        *args: A real call: tensors of any dtype (float64 for a tight comparison).
        axis_sizes: Sizes of the mesh axis. Sizes that divide no extent, or exceed one, test uneven
            and empty shards.
        rules: The rules to go by; the built-in ones if omitted.
        execute: Runs the operator; PyTorch's own if omitted.
        **kwargs: Arguments of the call by name.

    Raises:
        SignatureError: the operator has no rule.
        SbpLookupError: PyTorch has no such operator.
    """
    run = execute or run_op
    call, tensors = call_of(op, args, kwargs, execute=run)
    whole = _tensors(run(op, args, kwargs))
    draw = torch.Generator().manual_seed(0)
    claims: list[tuple[tuple[int, ...], Signature]] = []
    for size in axis_sizes:
        claims += [((size,), combine([part])) for part in derive(call, size, rules=rules)]
    claims += _products(call, axis_sizes, rules)
    wrong = []
    for mesh_shape, signature in claims:
        trial = _Trial(call, signature, Placement.grid(mesh_shape), rules, run, draw)
        reason = trial.refutation(tensors, whole)
        if reason:
            wrong.append(Wrong(signature=signature, mesh_shape=mesh_shape, reason=reason))
    return VerifyReport(op=op, claimed=tuple(claims), wrong=tuple(wrong))


def _products(
    call: OpCall, axis_sizes: Sequence[int], rules: Registry | None
) -> list[tuple[tuple[int, ...], Signature]]:
    """Return a repeatable sample of the signatures on a 2-D mesh."""
    mesh_shape = (axis_sizes[0], axis_sizes[-1])
    found = list(enumerate_signatures(call, mesh_shape, rules=rules))
    chosen = random.Random(0).sample(found, min(_NUM_PRODUCTS, len(found)))
    return [(mesh_shape, signature) for signature in chosen]


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

    made = _tensors((execute or run_op)(op, args, kwargs))
    literals = tuple(map(literal, args))
    named = {key: literal(value) for key, value in kwargs.items()}
    call = OpCall(
        op=op,
        args=literals,
        kwargs=named,
        inputs=tuple(map(_type, tensors)),
        tensor_names=tuple(f"input{index}" for index in range(len(tensors))),
        outputs=tuple(map(_type, made)),
        tags=tags_of(op),
        where=(f"op {op}",),
    )
    return call, tuple(tensors)


def abstract_call(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
    """Return the `OpCall` of a call whose tensors may be shapes; nothing is computed.

    Args:
        op: Operator and overload.
        args: Tensors as tensors, `TensorType`s or shapes (float32); other arguments as they are.
        kwargs: Arguments by name.

    Raises:
        SbpLookupError: PyTorch has no such operator.
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
    return call_of(op, shapes, named)[0]


def overload(op: str) -> OpOverload:
    """Return PyTorch's operator of a name such as `aten.mm.default`.

    Raises:
        SbpLookupError: there is none.
    """
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise SbpLookupError(
            f"PyTorch has no operator {op!r}",
            accepted="namespace.operator.overload, such as aten.mm.default",
        )
    return found


def tags_of(op: str) -> tuple[str, ...]:
    """Return the tags of an operator that signatures need; none for one that is not PyTorch's."""
    try:
        found = overload(op)
    except SbpLookupError:
        return ()
    names = {str(tag).rsplit(".", maxsplit=1)[-1] for tag in found.tags}
    kept = {"pointwise": "pointwise", "nondeterministic_seeded": "seeded"}
    return tuple(tag for name, tag in kept.items() if name in names)


def run_op(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run one of PyTorch's operators."""
    with torch.no_grad():
        return overload(op)(*args, **kwargs)


def _type(tensor: torch.Tensor) -> TensorType:
    return TensorType(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _tensors(made: Any) -> tuple[torch.Tensor, ...]:
    """Return the outputs of an operator that are tensors."""
    listed = made if isinstance(made, list | tuple) else (made,)
    return tuple(entry for entry in listed if isinstance(entry, torch.Tensor))


class _Trial:
    """One signature of one call on one mesh."""

    def __init__(
        self,
        call: OpCall,
        signature: Signature,
        mesh: Placement,
        rules: Registry | None,
        run: Execute,
        draw: torch.Generator,
    ) -> None:
        self.call = call
        self.signature = signature
        self.mesh = mesh
        self.rules = rules
        self.run = run
        self.draw = draw

    def refutation(self, inputs: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]) -> str:
        """Return how the ranks together differ from the whole call; empty if they do not."""
        shards = [
            self._cut(tensor, sbp)
            for tensor, sbp in zip(inputs, self.signature.inputs, strict=True)
        ]
        made = []
        for index, rank in enumerate(self.mesh.rank_list):
            try:
                made.append(self._rank(rank, [pieces[index] for pieces in shards]))
            except (RuntimeError, ValueError, IndexError, TypeError, SbpError) as error:
                return f"rank {rank} fails: {str(error).splitlines()[0]}"
        for output, (expected, sbp) in enumerate(zip(whole, self.signature.outputs, strict=True)):
            reason = self._compare([tensors[output] for tensors in made], expected, sbp)
            if reason:
                return f"output {output}: {reason}"
        return ""

    def _rank(self, rank: int, shards: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        local = localize(self.call, self.signature, self.mesh, rank, rules=self.rules)
        by_name = dict(zip(self.call.tensor_names, shards, strict=True))

        def value(argument: Argument) -> Any:
            if isinstance(argument, Symbol):
                kinds = {"device": torch.device}
                return kinds.get(argument.kind, partial(getattr, torch))(argument.name)
            if isinstance(argument, tuple):
                return [value(part) for part in argument]
            return argument

        args = [value(map_refs(entry, lambda ref: by_name[ref.name])) for entry in local.args]
        kwargs = {
            key: value(map_refs(entry, lambda ref: by_name[ref.name]))
            for key, entry in local.kwargs.items()
        }
        return _tensors(self.run(local.op, args, kwargs))

    def _cut(self, tensor: torch.Tensor, sbp: NdSbp) -> list[torch.Tensor]:
        """Return the shard of each rank, in mesh order."""
        pieces = [tensor]
        for size, entry in zip(self.mesh.mesh_shape, sbp, strict=True):
            pieces = [part for piece in pieces for part in self._cut_axis(piece, size, entry)]
        return [piece.clone(memory_format=torch.contiguous_format) for piece in pieces]

    def _cut_axis(self, tensor: torch.Tensor, size: int, entry: object) -> Iterator[torch.Tensor]:
        if isinstance(entry, Split):
            for start, stop in split_bounds(tensor.shape[entry.dim], size):
                yield tensor.narrow(entry.dim, start, stop - start)
        elif not isinstance(entry, Partial):
            yield from [tensor] * size
        elif entry.reduction == "sum":
            rest = tensor
            for _ in range(size - 1):
                noise = self._noise(tensor)
                rest = rest - noise
                yield noise
            yield rest
        else:
            sign = -1 if entry.reduction == "max" else 1
            owner = torch.randint(size, tensor.shape, generator=self.draw)
            for rank in range(size):
                beside = tensor + sign * self._noise(tensor).abs()
                yield torch.where(owner == rank, tensor, beside)

    def _noise(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return torch.randn(tensor.shape, dtype=tensor.dtype, generator=self.draw)
        return torch.randint(-5, 6, tensor.shape, generator=self.draw).to(tensor.dtype)

    def _compare(self, pieces: list[torch.Tensor], expected: torch.Tensor, sbp: NdSbp) -> str:
        """Put the pieces together, last mesh axis first, and compare."""
        for (rank, coordinate), piece in zip(self.mesh.coordinates(), pieces, strict=True):
            shape = local_shape(expected.shape, sbp, self.mesh.mesh_shape, coordinate)
            if tuple(piece.shape) != shape or piece.dtype != expected.dtype:
                return f"rank {rank} has {_type(piece)} instead of {expected.dtype} {list(shape)}"
        for size, entry in reversed(list(zip(self.mesh.mesh_shape, sbp, strict=True))):
            groups = [pieces[at : at + size] for at in range(0, len(pieces), size)]
            if isinstance(entry, Split):
                pieces = [torch.cat(group, entry.dim) for group in groups]
            elif isinstance(entry, Partial):
                pieces = [_reduce(group, entry.reduction) for group in groups]
            else:
                for group in groups:
                    if any(_difference(group[0], other) for other in group[1:]):
                        return "ranks that should hold the same value differ"
                pieces = [group[0] for group in groups]
        return _difference(pieces[0], expected)


def _reduce(pieces: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    stacked = torch.stack(list(pieces))
    if reduction == "sum":
        return stacked.sum(0, dtype=stacked.dtype)
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return how two tensors differ; empty if they agree within tolerance."""
    tolerance = _TOLERANCE.get(expected.dtype, 0.0 if not expected.is_floating_point() else 1e-2)
    if torch.allclose(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    if found.shape != expected.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    wide = torch.float64 if not expected.is_complex() else torch.complex128
    return f"differs by up to {(found.to(wide) - expected.to(wide)).abs().max().item():.3g}"
