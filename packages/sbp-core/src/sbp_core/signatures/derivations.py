"""Derive all signatures (legal ways to shard) of an operator call from the operator's notation.

For one mesh axis they follow from the labels (split one of them) and from linearity and monotony
(partial in, partial out); "all B" always exists. Rejected candidates are recorded with their
reasons, for error messages. `signatures.axes` combines several axes.

    i k, k j -> i j     split i:  S(0) B    -> S(0)    `i` leads a dim of input 0 and of the output
                        split j:  B    S(1) -> S(1)
                        split k:  S(1) S(0) -> P       `k` is missing in the output: a sum over it
                        linear 0: P    B    -> P       and likewise linear 1
                                  B    B    -> B
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod

from sbp_core.graph.ir import TensorType
from sbp_core.sbp import B, Partial, S, Sbp, Split
from sbp_core.signatures.arguments import call_key
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.extents import label_sizes, notation_of
from sbp_core.signatures.notation import Dependence, Effect, Notation
from sbp_core.signatures.rule_registry import RuleRegistry, installed_rules
from sbp_core.signatures.signature import Requirement, Signature1d

#: For each effect: which partial values of the inputs give which partial outputs.
_PARTIALS = {
    Effect.LINEAR: (("sum", "sum"),),
    Effect.INCREASING: (("max", "max"), ("min", "min")),
    Effect.DECREASING: (("max", "min"), ("min", "max")),
    Effect.MAX: (("max", "max"),),
    Effect.MIN: (("min", "min"),),
    Effect.FALLS: (("min", "max"),),
    Effect.UNREAD: (("sum", ""), ("max", ""), ("min", "")),
    Effect.IGNORED: (("sum", ""), ("max", ""), ("min", "")),
    Effect.FREE: (),
}


#: Narrow integers: the parts of a partial sum may overflow, and wrap back in the sum.
_WRAPPING = {"int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedSignature:
    """A candidate that is not legal, and why."""

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """All candidates of a call along one mesh axis, before the size of the axis is known.

    Args:
        notation: The notation that they follow from.
        legal: Candidates that are legal on any axis of a fitting size.
        behind: Candidates that are legal only after other axes (see `Signature1d.follows`).
        rejected: Candidates that are not legal on a first axis, with the reason.
    """

    notation: Notation
    legal: tuple[Signature1d, ...]
    behind: tuple[Signature1d, ...]
    rejected: tuple[RejectedSignature, ...]


@dataclass(frozen=True, slots=True)
class _CallKey:
    """A call as a key of caches: equal for calls with the same meaning, whatever their names."""

    text: str
    call: OpCall = field(compare=False)


def derivation(call: OpCall, rules: RuleRegistry | None = None) -> Derivation:
    """Return every candidate signature of a call along one mesh axis, legal or not.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    return _derivation(_CallKey(call_key(call), call), rules or installed_rules())


@lru_cache(maxsize=65536)
def _derivation(key: _CallKey, rules: RuleRegistry) -> Derivation:
    call = key.call
    notation = notation_of(rules.rule(call), call)
    # If a signature follows in several ways, the first origin is kept, so the most informative ways
    # come first: a split of a label before linearity, the notation before signatures that were only
    # found by execution.
    found = _Candidates(call, notation)
    for label in notation.labels:
        found.split(label)
    if notation.addends is not None:
        # A sum of products is jointly linear in one factor of each addend: `j + i k, k j -> i j` in
        # (j, i k) and in (j, k j). It is not in j alone: every rank would add the whole product.
        for factors in product(*_factors(notation).values()):
            found.add_dependence(Dependence(effect=Effect.LINEAR, inputs=tuple(sorted(factors))))
    for dependence in notation.dependences:
        found.add_dependence(dependence)
    found.add([B] * len(call.inputs), [B] * len(call.outputs), "all B")
    # Last, because it varies all candidates so far.
    found.split_free_arguments()
    for signature in rules.discovered(call):
        found.legal.setdefault((signature.inputs, signature.outputs), signature)
    return Derivation(
        notation=notation,
        legal=tuple(found.legal.values()),
        behind=tuple(found.behind),
        rejected=tuple(found.rejected),
    )


def derive(
    call: OpCall, axis_size: int, *, rules: RuleRegistry | None = None
) -> tuple[Signature1d, ...]:
    """Return the legal signatures of a call along one mesh axis of `axis_size` ranks.

    Raises:
        SignatureError: the operator has no rule, or the rule does not fit the shapes.
    """
    return _derive(_CallKey(call_key(call), call), axis_size, rules or installed_rules())


@lru_cache(maxsize=65536)
def _derive(key: _CallKey, axis_size: int, rules: RuleRegistry) -> tuple[Signature1d, ...]:
    return tuple(
        signature
        for signature in _derivation(key, rules).legal
        if not any(entry.failure(axis_size) for entry in signature.requires)
    )


def work_flop(call: OpCall, *, rules: RuleRegistry | None = None) -> float:
    """Return the work of the whole call in floating-point operations.

    A contraction costs 2 for each point of its labels (a multiplication and an addition), a
    reduction 1 for each element read, anything else 1 for each element written; a view costs 0.

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


def _factors(notation: Notation) -> Mapping[int, list[int]]:
    """Return the arguments of each addend."""
    factors: dict[int, list[int]] = {}
    for index, addend in enumerate(notation.addends or ()):
        factors.setdefault(addend, []).append(index)
    return factors


def _origin(dependence: Dependence) -> str:
    """Return the text of a dependence: `jointly linear in arguments 0, 1`."""
    listed = ", ".join(map(str, dependence.inputs))
    many = "arguments" if len(dependence.inputs) != 1 else "argument"
    if dependence.effect in (Effect.UNREAD, Effect.IGNORED, Effect.FREE):
        return f"{dependence.effect.value} {many} {listed}"
    joint = "jointly " if len(dependence.inputs) > 1 else ""
    words = {Effect.MAX: "maxima of", Effect.MIN: "minima of", Effect.FALLS: "minima of"}
    how = words.get(dependence.effect, f"{joint}{dependence.effect.value} in")
    result = {Effect.MAX: "maxima", Effect.MIN: "minima", Effect.FALLS: "maxima"}
    gives = f" give {result[dependence.effect]}" if dependence.effect in result else ""
    return f"{how} {many} {listed}{gives}"


def _why_irreducible(entry: TensorType, reduction: str) -> str:
    """Return why values of a dtype do not have a reduction; empty if they do."""
    if reduction == "sum" and entry.dtype == "bool":
        return "a bool output cannot be summed"
    if reduction in ("max", "min") and entry.dtype.startswith("complex"):
        return "complex numbers have no maximum"
    return ""


class _Candidates:
    """Collects the candidates of one call."""

    def __init__(self, call: OpCall, notation: Notation) -> None:
        self.call = call
        self.notation = notation
        self.sizes = label_sizes(call, notation)
        self.legal: dict[tuple[tuple[Sbp, ...], tuple[Sbp, ...]], Signature1d] = {}
        self.behind: list[Signature1d] = []
        self.rejected: list[RejectedSignature] = []

    def add(
        self,
        inputs: Sequence[Sbp],
        outputs: Sequence[Sbp],
        origin: str,
        requires: tuple[Requirement, ...] = (),
        reason: str = "",
        label: str = "",
    ) -> None:
        """Record a candidate: as legal, or as rejected if there is a reason."""
        key = (tuple(inputs), tuple(outputs))
        if reason:
            self.rejected.append(RejectedSignature(inputs=key[0], outputs=key[1], reason=reason))
        else:
            signature = Signature1d(
                inputs=key[0], outputs=key[1], origin=origin, requires=requires, label=label
            )
            self.legal.setdefault(key, signature)

    def split(self, label: str) -> None:
        """Split one label: S where it leads a dim, B or partial where it is missing."""
        notation = self.notation
        # `extents`: how many elements there are to cut in each dim with the label. `slower`: the
        # labels that must be split down before this one, and the dim that they are in.
        extents: dict[int, None] = {}
        slower: dict[str, int] = {}
        reason = ""
        is_read = any(label in names for dims in notation.inputs for names in dims)
        entries: list[list[Sbp]] = [[], []]
        for side, (types, tensors) in enumerate(
            ((self.call.inputs, notation.inputs), (self.call.outputs, notation.outputs))
        ):
            for index, (entry, dims) in enumerate(zip(types, tensors, strict=True)):
                dim = next((at for at, names in enumerate(dims) if label in names), None)
                if dim is not None:
                    ahead = dims[dim][: dims[dim].index(label)]
                    before = [name for name in ahead if self.sizes.get(name) != 1]
                    # (a b) is split along its slowest label first: `b` only once earlier axes have
                    # split `a` down to one element each; then the dim has extent / a to split.
                    parts = prod(self.sizes.get(name, 1) for name in before)
                    extents[entry.shape[dim] // max(parts, 1)] = None
                    slower |= dict.fromkeys(before, dim)
                    entries[side].append(S(dim))
                elif side == 1 and is_read:
                    # The label is reduced away here. An output without a label that no input has,
                    # such as the other output of a factory, does not depend on it, and is whole
                    # (`B` below).
                    reduction = notation.reduction(label, index)
                    if reduction == "none":
                        entries[side].append(B)
                    else:
                        entries[side].append(Partial(reduction))
                        reason = reason or _why_irreducible(entry, reduction)
                else:
                    entries[side].append(B)
        if label in notation.whole:
            why = f": {notation.why}" if notation.why else ""
            reason = f"{self.call.op} needs that dim whole{why}"
        requires = self._requirements(label, tuple(extents))
        for inputs in self._input_variants(label, entries[0]):
            self._add_split(label, (inputs, entries[1]), requires, slower, reason)

    def _add_split(
        self,
        label: str,
        entries: tuple[list[Sbp], list[Sbp]],
        requires: tuple[Requirement, ...],
        slower: Mapping[str, int],
        reason: str,
    ) -> None:
        """Record a split; a split of a label after slower ones is for later mesh axes only.

        On a first axis, shards of `b` in a dim (a b) would not be contiguous.
        """
        origin = f"split of label {label}"
        # Both are recorded: `behind` for axes after others that have split the slower labels, and
        # the rejection for messages about a first axis.
        if slower and not reason:
            reason = f"only the slowest factor of dim {min(slower.values())} may be split"
            # The label's extent decides whether earlier axes have split it down to one element.
            if all(name in self.sizes for name in slower):
                follows = tuple((name, self.sizes[name]) for name in slower)
                self.behind.append(
                    Signature1d(
                        inputs=tuple(entries[0]),
                        outputs=tuple(entries[1]),
                        origin=origin,
                        requires=requires,
                        label=label,
                        follows=follows,
                    )
                )
        self.add(*entries, origin, requires, reason, label)

    def _requirements(self, label: str, extents: tuple[int, ...]) -> tuple[Requirement, ...]:
        found = []
        size = self.sizes.get(label)
        if len(extents) > 1 or size not in (None, *extents):
            # Dims of different extents that one label leads (`b` in `(b a)` and in `b`) are cut at
            # the same places only if every rank has equally many elements of the label.
            shared = extents if size is None else (size,)
            found.append(Requirement(label=label, extents=shared, even=True))
        if label in self.notation.nonempty:
            found.append(Requirement(label=label, extents=extents, even=False))
        return tuple(found)

    def _input_variants(self, label: str, inputs: list[Sbp]) -> Iterator[list[Sbp]]:
        """Yield the inputs of a split; where `label` is summed, addends without it must be partial.

        In `i k, k j + i j` split along k, each rank would add all of the bias to its partial
        product, and the sum of ranks would hold it as often as there are ranks. So the bias must
        be partial as well. In a product without the label one factor is partial, any of them.

        Arguments that are not read may also be partial; ignored ones, whole or partial.
        """
        notation = self.notation
        yield from self._unread_variants(inputs)
        counted_once = [index for name, index in notation.beside if name == label]
        if counted_once:
            # An argument that counts once, such as the tensor that `scatter_add` adds to. Under a
            # sum it must be partial; a maximum may use a whole one on every rank: max(x, x) = x.
            kind = notation.reduction(label, 0)
            yield [
                Partial(kind) if at in counted_once else entry for at, entry in enumerate(inputs)
            ]
            if kind == "sum":
                return
        output = [name for dims in notation.outputs for names in dims for name in names]
        if notation.addends is None or label in output:
            yield inputs
            return
        # Addends that lack the label: in each, one factor is made partial, in every way.
        without = [
            factors
            for factors in _factors(notation).values()
            if not any(isinstance(inputs[index], Split) for index in factors)
        ]
        for chosen in product(*without):
            yield [Partial() if index in chosen else entry for index, entry in enumerate(inputs)]

    def _unread_variants(self, inputs: list[Sbp]) -> Iterator[list[Sbp]]:
        """Yield the inputs with other entries for arguments whose elements are never read."""
        found = {
            index: dependence.effect
            for dependence in self.notation.dependences
            if dependence.effect in (Effect.UNREAD, Effect.IGNORED)
            for index in dependence.inputs
        }
        # Local shapes follow from the splits. So an argument whose shape is read keeps its split;
        # an argument that the label does not split has its full shape either way. An ignored one
        # may lose its split, too, if another argument still shows how large the shard is (`read`).
        free = {
            index
            for index, effect in found.items()
            if effect is Effect.IGNORED or not isinstance(inputs[index], Split)
        }
        read = any(isinstance(cut, Split) for at, cut in enumerate(inputs) if at not in free)
        others: list[Sbp] = [B, Partial()] if free and read else []
        for other in others:
            if other == B or not any(_why_irreducible(self.call.inputs[at], "sum") for at in free):
                yield [other if at in free else entry for at, entry in enumerate(inputs)]

    def add_dependence(self, dependence: Dependence) -> None:
        """Add the candidates in which partial arguments of a dependence give partial outputs."""
        call = self.call
        reached = dependence.outputs
        if dependence.effect in (Effect.UNREAD, Effect.IGNORED):
            reached = ()
        elif reached is None:
            reached = tuple(range(len(call.outputs)))
        pairs = [
            (before, after)
            for before, after in _PARTIALS[dependence.effect]
            if not any(_why_irreducible(call.inputs[index], before) for index in dependence.inputs)
            and not any(_why_irreducible(call.outputs[index], after) for index in reached)
        ]
        # Split labels need no such test: the operator itself forms sums over parts of exact values.
        # Here parts of one value pass through, and f(a) + f(b) must be f(a + b).
        if dependence.effect is Effect.LINEAR and self._is_inexact(dependence.inputs, reached):
            return
        origin = _origin(dependence)
        for before, after in pairs:
            inputs: list[Sbp] = [B] * len(call.inputs)
            outputs: list[Sbp] = [B] * len(call.outputs)
            for index in dependence.inputs:
                inputs[index] = Partial(before)
            for index in reached:
                outputs[index] = Partial(after)
            self.add(inputs, outputs, origin)
        if dependence.effect is Effect.IGNORED:
            for index in dependence.inputs:
                for dim in range(len(call.inputs[index].shape)):
                    inputs = [B] * len(call.inputs)
                    inputs[index] = S(dim)
                    self.add(inputs, [B] * len(call.outputs), origin)

    def split_free_arguments(self) -> None:
        """Add to each candidate its variants with free arguments split in every way."""
        for dependence in self.notation.dependences:
            for index in dependence.inputs if dependence.effect is Effect.FREE else ():
                splits = [S(dim) for dim in range(len(self.call.inputs[index].shape))]
                # Iterate over a copy: variants added here are not split by this argument again.
                for signature, split in product(tuple(self.legal.values()), splits):
                    inputs = (*signature.inputs[:index], split, *signature.inputs[index + 1 :])
                    if signature.inputs[index] == B:
                        made = replace(signature, inputs=inputs)
                        self.legal.setdefault((inputs, signature.outputs), made)

    def _is_inexact(self, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
        """Return whether a linear operator is not linear on its dtypes.

        This is so where reals are rounded to integers, or narrow integers that may wrap are
        widened.
        """
        before = {self.call.inputs[index].dtype for index in inputs}
        after = {self.call.outputs[index].dtype for index in outputs}
        exact = all(dtype.startswith(("int", "uint")) for dtype in before)
        rounds = not exact and any(dtype.startswith(("int", "uint")) for dtype in after)
        # Parts of 64 bits are assumed not to wrap.
        wraps = bool(before & _WRAPPING) and before != after
        return rounds or (wraps and bool(after))
