"""Writing by index along one dim: `scatter`, `index_add` and their kin.

    v a, k a, k a => v a         scatter(x, 0, index, source)
    v a, k, k a => v a           index_add(x, 0, index, source)

A rank that holds a window of the dim written to (`v`) drops the updates that go elsewhere. Updates
(`k`) may be split where parts of them give partial values; see `updates`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sbp_aten.rules.updates import Updates, combining, meeting_number, replacing
from sbp_aten.rules.windows import (
    given,
    is_cut,
    with_spare,
    without_spare,
    wrapped,
    writable,
)
from sbp_core.graph import Ref
from sbp_core.signatures import (
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
    run_as_is,
    wrap_dim,
)

#: What happens to updates that have these labels.
_Meeting = Callable[[OpCall, Sequence[str]], Updates]


def _at(call: OpCall) -> int:
    """Return the dim that is written along."""
    return wrap_dim(argument(call, 1, "dim"), max(len(call.inputs[0].shape), 1))


def _target(call: OpCall) -> Dims:
    """Return the dims of the tensor that is written to."""
    num_dims, at = len(call.inputs[0].shape), _at(call)
    return tuple(("v" if dim == at else f"d{dim}",) for dim in range(num_dims))


def _scattered_dims(call: OpCall) -> tuple[Dims, ...]:
    """Return the dims of a call whose index has the rank of the tensor.

    Where the index is shorter than the tensor beside `dim`, or the values than either, they have
    labels of their own: `i1`, `s1`.
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
    """Return the dims of a call whose index names rows; it may lack its dim, if it names one."""
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
    """Return the meaning of a write, given the dims of its arguments and what updates do."""

    def meaning(call: OpCall) -> Notation:
        inputs = dims_of(call)
        labels = {name for dims in inputs for (name,) in dims}
        # Values without dims are the update of one row, and a tensor without dims has one element.
        alone = not call.inputs[0].shape or any(not entry.shape for entry in call.inputs[2:])
        updates = meeting(call, ["k"] if "k" in labels else [])
        own = {name for name in labels if name[0] in "is"} | ({"k"} & labels if alone else set())
        return Notation(
            inputs=inputs,
            outputs=(inputs[0],),
            dependences=updates.dependences,
            reductions=updates.reductions,
            beside=updates.beside,
            whole=updates.whole | own,
            why=updates.why if "k" in updates.whole else "it differs from the others in extent",
        )

    return meaning


def _trimmed(
    builder: LocalProgramBuilder, entry: Ref, call: OpCall, shards: Shards, tensor: int
) -> Ref:
    """Cut index or values to what the shard is for, where they do not share its extent.

    Beside `dim` they go along with the tensor; along it, the values go along with the index.
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
        rows: Whether the index names rows; then extents agree, and nothing needs to be cut.
        wraps: Whether the index may count from behind.
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
    """With `reduce` and `include_self`."""
    kind, starts = argument(call, 4, "reduce"), argument(call, 5, "include_self", True)
    return combining(kind, call.inputs[0], 2, over, starts=starts)


def _number_reduced(call: OpCall, over: Sequence[str]) -> Updates:
    kind, number = argument(call, 4, "reduce"), argument(call, 3, "value")
    return meeting_number(kind, call.inputs[0], over, number)


def _scattered(meeting: _Meeting, values: str) -> Rule:
    return Rule(_meaning(_scattered_dims, meeting), _shard(values, rows=False))


def _by_rows(meeting: _Meeting, values: str, *, wraps: bool = False) -> Rule:
    return Rule(_meaning(_rows_dims, meeting), _shard(values, rows=True, wraps=wraps))


RULES = {
    "aten.index_add.default": _by_rows(_added, "source"),
    "aten.index_copy.default": _by_rows(_replaced, "source"),
    "aten.index_fill.int_Scalar": _by_rows(_replaced, "value", wraps=True),
    "aten.index_fill.int_Tensor": _by_rows(_replaced, "value", wraps=True),
    "aten.index_reduce.default": _by_rows(_reduced, "source"),
    "aten.scatter.reduce": _scattered(_reduced, "src"),
    "aten.scatter.src": _scattered(_replaced, "src"),
    "aten.scatter.value": _scattered(_replaced, "value"),
    "aten.scatter.value_reduce": _scattered(_number_reduced, "value"),
    "aten.scatter_add.default": _scattered(_added, "src"),
    "aten.scatter_reduce.two": _scattered(_reduced, "src"),
}
