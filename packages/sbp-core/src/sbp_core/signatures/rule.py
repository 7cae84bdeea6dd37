"""`Rule`: the sharding rule of an operator: its meaning, and how its arguments change on a shard.

The rules of ATen's operators are in `sbp_aten.rules`, by family; they are registered through the
hook `sbp_signatures`, like the rules of third parties.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from sbp_core.graph.ir import Argument, Ref
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation

#: Half-open range of indices in one dim.
Range = tuple[int, int]

#: Bounds of a shard in each dim of the logical tensor.
Bounds = tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """One operator call of one rank; `Ref`s are its shards or results of earlier calls.

    Args:
        op: `aten.mm.default`.
        args, kwargs: In the operator's own order.
        outputs: Names of its results; empty for the only call of a program, whose results are the
            outputs of the logical call in their order.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """The calls that one rank executes for a logical call, one after the other.

    Args:
        calls: At least one. The names of their results are unique, and begin with `~`.
        results: The value of each output of the logical call; empty if `calls` is one call that
            makes all of them.
    """

    calls: tuple[LocalCall, ...]
    results: tuple[Ref, ...] = ()


class LocalProgramBuilder:
    """Builds a `LocalProgram` call by call; each call returns a `Ref` to its result.

    builder = LocalProgramBuilder()
    total = builder("aten.sum.dim_IntList", x, (0,))
    return builder.program(builder("aten.div.Scalar", total, 12))
    """

    def __init__(self) -> None:
        self._calls: list[LocalCall] = []
        self._count = 0

    def __call__(self, op: str, /, *args: Argument, **kwargs: Argument) -> Ref:
        """Add a call with one tensor as its result."""
        return self.several(1, op, *args, **kwargs)[0]

    def several(
        self, count: int, op: str, /, *args: Argument, **kwargs: Argument
    ) -> tuple[Ref, ...]:
        """Add a call with `count` tensors as results (omitted ones, `None`, not counted)."""
        names = tuple(f"~{self._count + index}" for index in range(count))
        self._count += count
        self._calls.append(LocalCall(op=op, args=args, kwargs=kwargs, outputs=names))
        return tuple(map(Ref, names))

    def program(self, *results: Ref) -> LocalProgram:
        """Return the program whose outputs, in the order of the logical call, are `results`."""
        return LocalProgram(calls=tuple(self._calls), results=results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """The slices of the logical tensors that one rank holds."""

    inputs: tuple[Bounds, ...]
    outputs: tuple[Bounds, ...]

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's shard of an output."""
        return tuple(stop - start for start, stop in self.outputs[index])


#: Returns the program of one rank for a call; a single call means a program of one call.
Localizer = Callable[[OpCall, Shards], LocalCall | LocalProgram]


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning of one operator, and how its calls run on a shard.

    Args:
        meaning: The notation: as text if it is always the same, else a function of the call.
        localize: How the call changes on a shard; None if it does not change.
    """

    meaning: str | Callable[[OpCall], Notation]
    localize: Localizer | None = None

    def notation(self, call: OpCall) -> Notation:
        """Return the notation of this call."""
        return parse_notation(self.meaning) if isinstance(self.meaning, str) else self.meaning(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTraits:
    """Properties of the operators of a namespace that passes ask for, besides their rules.

    Operators are named by their kind: `view` for `aten.view.default`.

    Args:
        views: Operators whose results may be in the memory of their arguments.
        casts: Operators whose result is the argument in another dtype, in separate memory.
        copies: Operators whose result has the elements of the argument, in separate memory; casts,
            too.
        joins: Operators whose result is concatenated from the arguments, or cut out of one, in
            separate memory.
        factories: Operators whose result is made from numbers alone, whatever tensor it resembles.
        extremes: Reductions to the largest or smallest element; `maximum` or `minimum`.
        elementwise: Some operators whose result has their tensors' layout, whatever their numbers.
        on_shards: By operator and overload, the operator to call on a shard instead: a shard need
            not be contiguous where the whole tensor is, so a view must be able to copy.
        in_place: Operators with a form that writes results over arguments, `add_` for `add`: for
            each result the number of the argument, with lists flattened. A result has the shape and
            dtype of its argument, or at least no smaller and no narrower ones.
    """

    views: frozenset[str] = frozenset()
    casts: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()
    joins: frozenset[str] = frozenset()
    factories: frozenset[str] = frozenset()
    extremes: Mapping[str, str] = field(default_factory=dict)
    elementwise: frozenset[str] = frozenset()
    on_shards: Mapping[str, str] = field(default_factory=dict)
    in_place: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSet:
    """The rules of a namespace of operators, such as `aten`.

    Args:
        rules: By operator and overload, `aten.mm.default`; may hold operators of other namespaces.
        pointwise: The rule of operators of the namespace that are tagged as pointwise and have no
            other rule; None: a rule that only knows the tag.
        traits: Properties of the operators that passes ask for, besides their rules.
    """

    rules: Mapping[str, Rule]
    pointwise: Rule | None = None
    traits: OperatorTraits = OperatorTraits()


@cache
def parse_notation(text: str) -> Notation:
    """Return `Notation.parse(text)`, cached."""
    return Notation.parse(text)


def with_local_shape(index: int, name: str = "size") -> Localizer:
    """Return the localiser of an operator with the shape of its output as an argument."""

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        args, kwargs = call.args, dict(call.kwargs)
        size = shards.output_shape()
        if index < len(args):
            args = (*args[:index], size, *args[index + 1 :])
        else:
            kwargs[name] = size
        return LocalCall(op=call.op, args=args, kwargs=kwargs)

    return localize
