"""Sharding rules of writing by index along one dim: `scatter`, `index_add` and similar operators.

    v a, k a, k a => v a         scatter(x, 0, index, source)
    v a, k, k a => v a           index_add(x, 0, index, source)

A rank that holds a window (range) of the dim that is written (`v`) drops updates outside of it.
Written values replace the old ones, are added to them, or combined by product, maximum or minimum.
Updates (`k`) may be split if the results of their parts are partial values.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sbp_aten.rules.formula import by_operator
from sbp_aten.rules.windows import given, is_cut, with_spare, without_spare, wrapped, writable
from sbp_core.graph import Ref, TensorType
from sbp_core.signatures import (
    Dependence,
    Dims,
    LocalCall,
    Localizer,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
    argument,
    increasing,
    linear,
    maxima,
    minima,
    run_as_is,
    wrap_dim,
)

#: Other names of kinds of update.
_NAMES = {"add": "sum", "multiply": "prod"}


#: Reductions of booleans: the sum is "or", the product is "and".
_OF_BOOLS = {"sum": "amax", "prod": "amin"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """How written values are combined with the old values, and with each other.

    Args:
        dependences: Dependences of the result on the old values, and on the written values.
        reductions: Reductions of the labels of updates.
        beside: Clauses `beside` of the notation for these labels: the tensor counts only once.
        whole: The labels of updates that must not be split.
        why: The reason.
    """

    dependences: tuple[Dependence, ...]
    reductions: tuple[tuple[str, str], ...] = ()
    beside: tuple[tuple[str, int], ...] = ()
    whole: frozenset[str] = frozenset()
    why: str = ""

    def notation(
        self, inputs: tuple[Dims, ...], own: Iterable[str] = (), why: str = ""
    ) -> Notation:
        """Return the notation of a write to argument 0.

        Args:
            inputs: Dims of each argument.
            own: Further labels that are whole.
            why: The reason; that of the updates if omitted.
        """
        return Notation(
            inputs=inputs,
            outputs=inputs[:1],
            dependences=self.dependences,
            reductions=self.reductions,
            beside=self.beside,
            whole=self.whole | set(own),
            why=why or self.why,
        )


def choosing(*inputs: int, zero: bool = False) -> tuple[Dependence, ...]:
    """Return the dependences of a result whose elements are input elements or a constant.

    Args:
        *inputs: Positions of one input, or of two.
        zero: Whether the constant is zero. With two inputs there is no constant.
    """
    alone = tuple(map(increasing, inputs))
    if len(inputs) == 1:
        return (linear(*inputs), *alone) if zero else alone
    return (linear(*inputs), *alone, increasing(*inputs))


def replacing(
    target: TensorType, values: int | None, over: Sequence[str], number: object = None
) -> Updates:
    """Return the updates if values replace the old values.

    Each element of the result is an element of the tensor (argument 0) or of the values.

    Args:
        target: The tensor that is written to, argument 0.
        values: Position of the values among the tensor arguments; None for a number.
        over: Labels of the updates.
        number: The number that is written instead.
    """
    dependences = choosing(0, *(() if values is None else (values,)), zero=number == 0)
    if values is None and target.dtype == "bool":
        # Writing True is "or", writing False is "and".
        reduction = "max" if number else "min"
        return Updates(
            dependences=dependences,
            reductions=tuple((label, reduction) for label in over),
            beside=tuple((label, 0) for label in over),
        )
    return Updates(
        dependences=dependences,
        whole=frozenset(over),
        why="of several updates of one place the last one counts",
    )


def combining(
    kind: str, target: TensorType, values: int, over: Sequence[str], *, starts: bool = True
) -> Updates:
    """Return the updates if values are combined with old values: sum, product, mean, max or min.

    Args:
        kind: `sum`, `add`, `prod`, `multiply`, `mean`, `amax` or `amin`.
        target: The tensor that is written to, argument 0.
        values: Position of the values among the tensor arguments.
        over: Labels of the updates.
        starts: Whether old values are included; else they are replaced where anything is written.
    """
    kind = _NAMES.get(kind, kind)
    if target.dtype == "bool":
        kind = _OF_BOOLS.get(kind, kind)
    if kind in ("amax", "amin", "sum"):
        extreme, reduction = (maxima, "max") if kind == "amax" else (minima, "min")
        both = (increasing(0), extreme(values), extreme(0, values))
        why = "a part of the updates does not tell which places are replaced"
        return Updates(
            dependences=(linear(0, values), increasing(0)) if kind == "sum" else both,
            reductions=tuple((label, reduction) for label in over if kind != "sum"),
            beside=tuple((label, 0) for label in over),
            whole=frozenset(() if starts else over),
            why="" if starts else why,
        )
    if kind == "mean":
        exact = target.dtype.startswith(("float", "bfloat", "complex"))
        return Updates(
            dependences=(linear(0, values), increasing(0)) if exact else (increasing(0),),
            whole=frozenset(over),
            why="the mean of a place is taken over all of its updates",
        )
    return Updates(
        dependences=(linear(0),) if starts else (increasing(0),),
        whole=frozenset(over),
        why="a product has no partial value",
    )


#: From a call and the labels of its updates: how they are combined.
_Meeting = Callable[[OpCall, Sequence[str]], Updates]


def _at(call: OpCall) -> int:
    """Return the dim along which values are written."""
    return wrap_dim(argument(call, 1, "dim"), max(len(call.inputs[0].shape), 1))


def _target(call: OpCall) -> Dims:
    """Return the dims of the tensor that is written to."""
    num_dims, at = len(call.inputs[0].shape), _at(call)
    return tuple(("v" if dim == at else f"d{dim}",) for dim in range(num_dims))


def _scattered_dims(call: OpCall) -> tuple[Dims, ...]:
    """Return the dims of a call whose index has the rank of the tensor.

    A dim whose extent differs from the tensor's (along `dim`: from the index's) has a separate
    label: `i1`, `s1`.
    """
    shape, index = call.inputs[0].shape, call.inputs[1].shape
    at = _at(call)

    def beside(entry: Sequence[int], mark: str) -> Dims:
        return tuple(
            (f"d{dim}" if dim < len(shape) and extent == shape[dim] else f"{mark}{dim}",)
            if dim != at
            else ("k" if at < len(index) and extent == index[at] else f"{mark}{dim}",)
            for dim, extent in enumerate(entry)
        )

    values = [beside(entry.shape, "s") for entry in call.inputs[2:] if entry.shape]
    return (
        _target(call),
        beside(index, "i"),
        *values,
        *((),) * (len(call.inputs) - 2 - len(values)),
    )


def _rows_dims(call: OpCall) -> tuple[Dims, ...]:
    """Return the dims of a call whose index selects rows; the index may be 0-d for one row."""
    at, target = _at(call), _target(call)
    named = [("k",) for _ in call.inputs[1].shape]
    values: list[Dims] = []
    for entry in call.inputs[2:]:
        along = named or [("s0",)]
        values.append((*target[:at], *along, *target[at + 1 :])[: len(entry.shape)])
    return (target, tuple(named), *values)


def _meaning(
    dims_of: Callable[[OpCall], tuple[Dims, ...]], meeting: _Meeting
) -> Callable[[OpCall], Notation]:
    """Return the meaning of a write, given the dims of its arguments and how updates combine."""

    def meaning(call: OpCall) -> Notation:
        inputs = dims_of(call)
        labels = {name for dims in inputs for (name,) in dims}
        # 0-d values are the update of one row, and a 0-d tensor has one element.
        alone = not call.inputs[0].shape or any(not entry.shape for entry in call.inputs[2:])
        updates = meeting(call, ["k"] if "k" in labels else [])
        own = {name for name in labels if name[0] in "is"} | ({"k"} & labels if alone else set())
        differs = "it differs from the others in extent"
        return updates.notation(inputs, own, "" if "k" in updates.whole else differs)

    return meaning


def _trimmed(
    builder: LocalProgramBuilder, entry: Ref, call: OpCall, shards: Shards, tensor: int
) -> Ref:
    """Cut index or values to the shard in dims where their extents differ.

    In dims other than `dim` they follow the tensor; along `dim`, the values follow the index.
    """
    at, shape = _at(call), call.inputs[tensor].shape
    for dim, extent in enumerate(shape):
        leader = 0 if dim != at else 1
        if leader == tensor or dim >= len(call.inputs[leader].shape):
            continue
        wide, window = call.inputs[leader].shape[dim], shards.inputs[leader][dim]
        if extent != wide and is_cut(window, wide):
            first, last = (min(bound, extent) for bound in window)
            entry = builder("aten.slice.Tensor", entry, dim, first, last)
    return entry


def _shard(values_name: str, *, rows: bool, wraps: bool = False) -> Localizer:
    """Return the localiser of a write.

    Args:
        values_name: Name of argument 3.
        rows: Whether the index selects rows; then extents agree, and nothing needs to be cut.
        wraps: Whether the index may be negative (counted from the end).
    """

    def localize(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
        names = ("self", "dim", "index", values_name)
        (target, _, index, values, *rest), named = given(call, names)
        shape, at = call.inputs[0].shape, _at(call)
        if not shape or 0 in call.inputs[1].shape:
            return run_as_is(call)
        builder = LocalProgramBuilder()
        if not rows:
            index = _trimmed(builder, index, call, shards, 1)
            if len(call.inputs) > 2:
                values = _trimmed(builder, values, call, shards, 2)
        window = shards.inputs[0][at]
        if not is_cut(window, shape[at]):
            return builder.program(builder(call.op, target, at, index, values, *rest, **named))
        if wraps:
            index = wrapped(builder, index, shape[at])
        index = writable(builder, index, window)
        target = with_spare(builder, target, (at,), len(shape))
        made = builder(call.op, target, at, index, values, *rest, **named)
        return builder.program(without_spare(builder, made, {at: window}))

    return localize


def _replaced(call: OpCall, over: Sequence[str]) -> Updates:
    values = 2 if len(call.inputs) > 2 else None
    number = argument(call, 3, "value") if values is None else None
    return replacing(call.inputs[0], values, over, number)


def _added(call: OpCall, over: Sequence[str]) -> Updates:
    return combining("sum", call.inputs[0], 2, over)


def _reduced(call: OpCall, over: Sequence[str]) -> Updates:
    """Return the updates of a call with `reduce` and `include_self`."""
    kind, starts = argument(call, 4, "reduce"), argument(call, 5, "include_self", True)
    return combining(kind, call.inputs[0], 2, over, starts=starts)


def _number_reduced(call: OpCall, over: Sequence[str]) -> Updates:
    """Return the updates with a number that is added to old values (`add`), or multiplied."""
    kind, number = argument(call, 4, "reduce"), argument(call, 3, "value")
    grows = kind == "add" or call.inputs[0].dtype == "bool"
    grows = grows or (isinstance(number, int | float) and number >= 0)
    affine = kind == "add" and number != 0
    return Updates(
        dependences=(*(() if affine else (linear(0),)), *((increasing(0),) if grows else ())),
        whole=frozenset(over),
        why="the number is applied to an element as often as its place is named",
    )


def _scattered(meeting: _Meeting, values: str) -> Rule:
    return Rule(_meaning(_scattered_dims, meeting), _shard(values, rows=False))


def _by_rows(meeting: _Meeting, values: str, *, wraps: bool = False) -> Rule:
    return Rule(_meaning(_rows_dims, meeting), _shard(values, rows=True, wraps=wraps))


RULES = by_operator(
    {
        "index_add": _by_rows(_added, "source"),
        "index_copy": _by_rows(_replaced, "source"),
        "index_fill.int_Scalar index_fill.int_Tensor": _by_rows(_replaced, "value", wraps=True),
        "index_reduce": _by_rows(_reduced, "source"),
        "scatter.reduce scatter_reduce.two": _scattered(_reduced, "src"),
        "scatter.src": _scattered(_replaced, "src"),
        "scatter.value": _scattered(_replaced, "value"),
        "scatter.value_reduce": _scattered(_number_reduced, "value"),
        "scatter_add": _scattered(_added, "src"),
    }
)
