"""A rule: what an operator means, and how its arguments change on a shard.

The rules of ATen's operators are in `sbp_aten.rules`, by family; they come through the hook
`sbp_signatures`, as those of third parties do.
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
        outputs: Names of what it makes; empty for the only call, which makes the outputs of the
            logical call in their order.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProgram:
    """What one rank executes for a logical call: calls one after the other.

    Args:
        calls: At least one. Names that they make are unique, and begin with `~`.
        results: What each output of the logical call is; empty if `calls` is one call that makes
            them all.
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
        """Add a call that makes one tensor."""
        return self.several(1, op, *args, **kwargs)[0]

    def several(
        self, count: int, op: str, /, *args: Argument, **kwargs: Argument
    ) -> tuple[Ref, ...]:
        """Add a call that makes `count` tensors (those it leaves out, `None`, not counted)."""
        names = tuple(f"~{self._count + index}" for index in range(count))
        self._count += count
        self._calls.append(LocalCall(op=op, args=args, kwargs=kwargs, outputs=names))
        return tuple(map(Ref, names))

    def program(self, *results: Ref) -> LocalProgram:
        """Return the program whose outputs, in the order of the logical call, are `results`."""
        return LocalProgram(calls=tuple(self._calls), results=results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Which slices of the logical tensors one rank holds."""

    inputs: tuple[Bounds, ...]
    outputs: tuple[Bounds, ...]

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's shard of an output."""
        return tuple(stop - start for start, stop in self.outputs[index])


#: Returns what one rank runs for a call; a single call means a program of one call.
Localizer = Callable[[OpCall, Shards], LocalCall | LocalProgram]


@dataclass(frozen=True, slots=True)
class Rule:
    """The meaning of one operator, and how its calls run on a shard.

    Args:
        meaning: The notation: as text if it is always the same, else a function of the call.
        localize: How the call changes on a shard; None if it does not.
    """

    meaning: str | Callable[[OpCall], Notation]
    localize: Localizer | None = None

    def notation(self, call: OpCall) -> Notation:
        """Return what this call means."""
        return parse_notation(self.meaning) if isinstance(self.meaning, str) else self.meaning(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTraits:
    """What passes ask about the operators of a namespace besides their rules.

    Operators are named by their kind: `view` of `aten.view.default`.

    Args:
        views: Whose results may be in the memory of their arguments.
        casts: Whose result is the argument in another dtype, in memory of its own.
        copies: Whose result has the elements of the argument, in memory of its own; casts, too.
        joins: Whose result is put together of the arguments, or cut out of one, in memory of its
            own.
        factories: Whose result is made of numbers alone, whatever tensors it is made like.
        extremes: Which reduce to the largest or smallest of the elements; `maximum` or `minimum`.
        elementwise: Some whose result lies as their tensors do, whatever numbers they are given.
        on_shards: By operator and overload, what is called on a shard instead: a shard need not be
            contiguous where the whole tensor is, so that a view must be able to copy.
        in_place: Which have a form that writes its results over arguments, `add_` of `add`, and
            over which: the number of an argument for each result, those of a list one by one. A
            result has the shape and dtype of its argument, or no smaller and no narrower ones.
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
        pointwise: The rule of an operator of the namespace that is tagged as pointwise and has none
            of its own; None: one that knows nothing but that.
        traits: What passes ask about the operators besides their rules.
    """

    rules: Mapping[str, Rule]
    pointwise: Rule | None = None
    traits: OperatorTraits = OperatorTraits()


@cache
def parse_notation(text: str) -> Notation:
    """Return `Notation.parse(text)`, cached."""
    return Notation.parse(text)


def with_local_shape(index: int, name: str = "size") -> Localizer:
    """Return the localiser of an operator one of whose arguments is the shape of its output."""

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        args, kwargs = call.args, dict(call.kwargs)
        size = shards.output_shape()
        if index < len(args):
            args = (*args[:index], size, *args[index + 1 :])
        else:
            kwargs[name] = size
        return LocalCall(op=call.op, args=args, kwargs=kwargs)

    return localize
