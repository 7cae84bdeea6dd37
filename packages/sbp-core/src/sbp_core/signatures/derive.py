"""The derivation: all signatures of a call, from the notation of its operator.

For one mesh axis they follow from the labels (split one of them), from linearity and monotony
(partial in, partial out), and there is always "all B". Several axes combine freely, but for what
`Requirement`s say. Rejected candidates are kept with the reason, for error messages. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import TensorType
from sbp_core.sbp import B, NdSbp, Partial, S, Sbp, Split
from sbp_core.signatures.arguments import identity
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Dependence, Dims, Effect, Notation
from sbp_core.signatures.registry import Registry, installed
from sbp_core.strategy import Signature

#: For each effect: which partial values of the inputs give which of the outputs.
_PASSES = {
    Effect.LINEAR: (("sum", "sum"),),
    Effect.INCREASING: (("max", "max"), ("min", "min")),
    Effect.DECREASING: (("max", "min"), ("min", "max")),
    Effect.UNREAD: (("sum", ""), ("max", ""), ("min", "")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """What the sizes of all mesh axes that split one label must fulfil together.

    Args:
        label: The label.
        extents: Extents of the dims that the label leads.
        even: The product of the sizes must divide every extent; else it must not exceed any (no
            shard may be empty).
    """

    label: str
    extents: tuple[int, ...]
    even: bool

    def failure(self, parts: int) -> str:
        """Return why `parts` parts are not possible; empty if they are."""
        for extent in sorted(self.extents):
            if self.even and extent % parts:
                return f"needs {extent} to be divisible by {parts}"
            if not self.even and extent < parts:
                return f"needs at least one of {extent} on each of {parts} ranks"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature1d:
    """How a call may be cut along one mesh axis.

    Args:
        inputs, outputs: In argument order (lists flattened) and output order.
        origin: Why it is legal: `split of label k`, `linear in argument 0`, `all B`.
        requires: What several axes that split the same label must fulfil together.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    origin: str
    requires: tuple[Requirement, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        left = ", ".join(map(repr, self.inputs))
        return f"{left} -> {', '.join(map(repr, self.outputs))}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that is not legal, and why."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """All candidates of a call along one mesh axis, before the size of the axis is known."""

    notation: Notation
    legal: tuple[Signature1d, ...]
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True, slots=True)
class _Key:
    """A call as a key of caches: equal for calls that mean the same."""

    text: str
    call: OpCall = field(compare=False)


def derivation(call: OpCall, rules: Registry | None = None) -> Derivation:
    """Return every candidate signature of a call along one mesh axis, legal or not.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    return _derivation(_Key(identity(call), call), rules or installed())


@lru_cache(maxsize=65536)
def _derivation(key: _Key, rules: Registry) -> Derivation:
    call = key.call
    notation = rules.rule(call).notation(call)
    found = _Candidates(call, notation)
    for label in notation.labels:
        found.split(label)
    if notation.addends is not None:
        for factors in product(*_factors(notation).values()):
            found.depend(Dependence(effect=Effect.LINEAR, inputs=tuple(sorted(factors))))
    for dependence in notation.dependences:
        found.depend(dependence)
    found.add([B] * len(call.inputs), [B] * len(call.outputs), "all B")
    return Derivation(
        notation=notation, legal=tuple(found.legal.values()), rejected=tuple(found.rejected)
    )


def derive(
    call: OpCall, axis_size: int, *, rules: Registry | None = None
) -> tuple[Signature1d, ...]:
    """Return the legal signatures of a call along one mesh axis of `axis_size` ranks.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    return _derive(_Key(identity(call), call), axis_size, rules or installed())


@lru_cache(maxsize=65536)
def _derive(key: _Key, axis_size: int, rules: Registry) -> tuple[Signature1d, ...]:
    return tuple(
        signature
        for signature in _derivation(key, rules).legal
        if not any(entry.failure(axis_size) for entry in signature.requires)
    )


def enumerate_signatures(
    call: OpCall, mesh_shape: Sequence[int], *, rules: Registry | None = None
) -> Iterator[Signature]:
    """Yield the legal signatures of a call on a mesh, one entry of `mesh_shape` an axis.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    axes = [derive(call, size, rules=rules) for size in mesh_shape]
    for parts in product(*axes):
        if not clash(parts, mesh_shape):
            yield combine(parts)


def combine(parts: Sequence[Signature1d]) -> Signature:
    """Return the signature whose entries on each mesh axis are those of `parts`."""
    return Signature(
        tuple(NdSbp(*entries) for entries in zip(*(part.inputs for part in parts), strict=True)),
        tuple(NdSbp(*entries) for entries in zip(*(part.outputs for part in parts), strict=True)),
    )


def clash(parts: Sequence[Signature1d], mesh_shape: Sequence[int]) -> str:
    """Return why signatures, each legal on its axis, are not legal together; empty if they are."""
    for part in parts:
        for requirement in part.requires:
            sizes = [
                size
                for other, size in zip(parts, mesh_shape, strict=True)
                if any(entry.label == requirement.label for entry in other.requires)
            ]
            failure = requirement.failure(prod(sizes))
            if failure:
                return f"{part.origin} {failure} (mesh axes of sizes {sizes} together)"
    return ""


def work_flop(call: OpCall, *, rules: Registry | None = None) -> float:
    """Return the work of the whole call in floating-point operations.

    A contraction costs 2 for each point of its labels (a multiplication and an addition), a
    reduction 1 for each element read, anything else 1 for each element written; a view nothing.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    notation = derivation(call, rules).notation
    if notation.work_flop is not None:
        return notation.work_flop
    if notation.addends is not None:
        sizes = label_sizes(call, notation)
        work = 0.0
        for factors in _factors(notation).values():
            names = {
                name for index in factors for dim in notation.inputs[index] for name in dim
            } | {name for dim in notation.outputs[0] for name in dim}
            work += (2 if len(factors) > 1 else 1) * prod(sizes.get(name, 1) for name in names)
        return float(work)
    kept = {name for dims in notation.outputs for dim in dims for name in dim}
    summed = set(notation.labels) - kept - notation.whole
    counted = call.inputs if summed else call.outputs
    return float(max((prod(entry.shape) for entry in counted), default=0))


def label_sizes(call: OpCall, notation: Notation) -> dict[str, int]:
    """Return the extent of each label that some dim consists of alone.

    Raises:
        SignatureError: the notation does not fit the shapes of the call.
    """
    _check_fit(len(call.inputs) == len(notation.inputs), call, notation)
    _check_fit(len(call.outputs) == len(notation.outputs), call, notation)
    pairs = list(_dims(call, notation))
    sizes: dict[str, int] = {}
    for names, extent in pairs:
        if len(names) == 1:
            _check_fit(sizes.setdefault(names[0], extent) == extent, call, notation)
    for names, extent in pairs:
        known = prod(sizes.get(name, 1) for name in names)
        if all(name in sizes for name in names):
            _check_fit(known == extent, call, notation)
        else:
            _check_fit(known == 0 or extent % known == 0, call, notation)
    return sizes


def _check_fit(fits: bool, call: OpCall, notation: Notation) -> None:
    if not fits:
        inputs = ", ".join(str(entry.shape) for entry in call.inputs)
        outputs = ", ".join(str(entry.shape) for entry in call.outputs)
        raise SignatureError(
            f"the notation '{notation}' does not fit {call.op} of {inputs} giving {outputs}",
            where=call.where,
            accepted="a notation with these arguments, dims and extents",
            todo=f"correct the rule of {call.op}",
        )


def _dims(call: OpCall, notation: Notation) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield (labels, extent) of every dim of every tensor."""
    types = (*call.inputs, *call.outputs)
    for entry, dims in zip(types, (*notation.inputs, *notation.outputs), strict=True):
        _check_fit(len(entry.shape) == len(dims), call, notation)
        yield from zip(dims, entry.shape, strict=True)


def _factors(notation: Notation) -> Mapping[int, list[int]]:
    """Return the arguments of each addend."""
    factors: dict[int, list[int]] = {}
    for index, addend in enumerate(notation.addends or ()):
        factors.setdefault(addend, []).append(index)
    return factors


def _kind(entry: TensorType) -> str:
    """Return whether sums of such tensors are exact: `bool` (no sums), `integer` or `real`."""
    if entry.dtype == "bool":
        return "bool"
    return "integer" if entry.dtype.startswith(("int", "uint")) else "real"


class _Candidates:
    """Collects the candidates of one call."""

    def __init__(self, call: OpCall, notation: Notation) -> None:
        self.call = call
        self.notation = notation
        self.sizes = label_sizes(call, notation)
        self.legal: dict[tuple[tuple[Sbp, ...], tuple[Sbp, ...]], Signature1d] = {}
        self.rejected: list[Rejected] = []

    def add(
        self,
        inputs: Sequence[Sbp],
        outputs: Sequence[Sbp],
        origin: str,
        requires: tuple[Requirement, ...] = (),
        reason: str = "",
    ) -> None:
        """Keep a candidate: as legal, or as rejected if there is a reason."""
        key = (tuple(inputs), tuple(outputs))
        if reason:
            self.rejected.append(Rejected(inputs=key[0], outputs=key[1], reason=reason))
        else:
            signature = Signature1d(inputs=key[0], outputs=key[1], origin=origin, requires=requires)
            self.legal.setdefault(key, signature)

    def split(self, label: str) -> None:
        """Split one label: S where it leads a dim, B or partial where it is missing."""
        notation = self.notation
        extents: dict[int, None] = {}
        reason = ""
        entries: list[list[Sbp]] = [[], []]
        for side, (types, tensors) in enumerate(
            ((self.call.inputs, notation.inputs), (self.call.outputs, notation.outputs))
        ):
            for index, (entry, dims) in enumerate(zip(types, tensors, strict=True)):
                dim = next((at for at, names in enumerate(dims) if label in names), None)
                if dim is not None:
                    extents[entry.shape[dim]] = None
                    reason = reason or self._buried(label, dims, dim)
                    entries[side].append(S(dim))
                elif side == 1 and self._contracted(label):
                    reduction = notation.reduction(label, index)
                    entries[side].append(Partial(reduction))
                    if reduction == "sum" and entry.dtype == "bool":
                        reason = reason or "a bool output cannot be summed"
                else:
                    entries[side].append(B)
        if label in notation.whole:
            reason = f"{self.call.op} needs that dim whole"
        requires = self._requirements(label, tuple(extents))
        for inputs in self._beside(label, entries[0]):
            self.add(inputs, entries[1], f"split of label {label}", requires, reason)

    def _requirements(self, label: str, extents: tuple[int, ...]) -> tuple[Requirement, ...]:
        found = []
        if len(extents) > 1:
            found.append(Requirement(label=label, extents=extents, even=True))
        if label in self.notation.nonempty:
            found.append(Requirement(label=label, extents=extents, even=False))
        return tuple(found)

    def _buried(self, label: str, dims: Dims, dim: int) -> str:
        """Return why `label` does not lead its dim; empty if it does."""
        before = dims[dim][: dims[dim].index(label)]
        slower = [name for name in before if self.sizes.get(name) != 1]
        return f"only the slowest factor of dim {dim} may be split" if slower else ""

    def _contracted(self, label: str) -> bool:
        return any(label in names for dims in self.notation.inputs for names in dims)

    def _beside(self, label: str, inputs: list[Sbp]) -> Iterator[list[Sbp]]:
        """Yield the inputs; where `label` is summed, addends without it have to be partial."""
        notation = self.notation
        output = [name for dims in notation.outputs for names in dims for name in names]
        if notation.addends is None or label in output:
            yield inputs
            return
        without = [
            factors
            for factors in _factors(notation).values()
            if not any(isinstance(inputs[index], Split) for index in factors)
        ]
        for chosen in product(*without):
            yield [Partial() if index in chosen else entry for index, entry in enumerate(inputs)]

    def depend(self, dependence: Dependence) -> None:
        """Pass partial values of the arguments of one dependence to the outputs."""
        call = self.call
        reached = dependence.outputs
        if dependence.effect is Effect.UNREAD:
            reached = ()
        elif reached is None:
            reached = tuple(range(len(call.outputs)))
        kinds_in = {_kind(call.inputs[index]) for index in dependence.inputs}
        kinds_out = {_kind(call.outputs[index]) for index in reached}
        rounds = "real" in kinds_in and "integer" in kinds_out
        if "bool" in kinds_in | kinds_out or (dependence.effect is Effect.LINEAR and rounds):
            return
        listed = ", ".join(map(str, dependence.inputs))
        many = "arguments" if len(dependence.inputs) != 1 else "argument"
        joint = "jointly " if len(dependence.inputs) > 1 else ""
        origin = f"{joint}{dependence.effect.value} in {many} {listed}".replace(
            "unread in", "unread"
        )
        for before, after in _PASSES[dependence.effect]:
            inputs: list[Sbp] = [B] * len(call.inputs)
            outputs: list[Sbp] = [B] * len(call.outputs)
            for index in dependence.inputs:
                inputs[index] = Partial(before)
            for index in reached:
                outputs[index] = Partial(after)
            self.add(inputs, outputs, origin)
