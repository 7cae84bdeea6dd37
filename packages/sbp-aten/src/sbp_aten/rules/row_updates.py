"""Sharding rules of updates of the rows of a table that a step has looked up.

    sbp.unique_rows(indices, gradients)      i*!, i*! d => n!, n! d      rows, and sums by row
    sbp.row_update(rows, sums, tensors, program, results, lazy)
                                             n!, n! d, v d, v 1 => v d, v 1
    sbp.own_rows, sbp.put_rows               only in plans

A table may be split by rows, and then each rank updates its own rows, or by columns, unless the
program reduces them. Lookups are whole: one row may be looked up on several ranks, whose gradients
have to be added before the update uses them.

The program is the update of one row, as calls (outputs, operator, args, kwargs) whose values have
names: `~sums` is the gradient, `~row0` the row of the first tensor. `Ref`s are host numbers, or 0-d
tensors, from outside. `results` names the new row of each of the first tensors.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sbp_aten.rules.formula import by_operator, notation
from sbp_aten.rules.windows import length
from sbp_core.graph import Argument, Ref
from sbp_core.signatures import (
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
)

#: Kinds of operators of a program that reduce the columns of a row.
REDUCTIONS = frozenset({"amax", "mean", "sum"})

_WHOLE = "a row may be looked up in several places, whose gradients are added first"


def _unique(call: OpCall) -> Notation:
    """`i*!, i*! d => n!, n! d`: linear in the gradients."""
    work = prod(call.inputs[1].shape)
    return notation(
        call,
        "i*!, i*! d => n!, n! d; linear 1 to 1; reduce d@0 none; reduce i*@0 none; "
        f"flop {work}; why {_WHOLE}",
    )


def _update(call: OpCall) -> Notation:
    """`n!, n! d, v d, v 1, () => v d, v 1`, as elementwise as its program is."""
    tensors, program = call.args[2], call.args[3]
    reduces = any(op.split(".")[1] in REDUCTIONS for _, op, _, _ in program)
    column = "d!" if reduces else "d"
    width = call.inputs[1].shape[1]

    def dims(shape: tuple[int, ...]) -> str:
        return f"v {column if shape[1] == width else '1'}" if shape else "()"

    count = call.inputs[1].shape[0]
    given = ", ".join(dims(entry.shape) for entry in call.inputs[2:])
    made = ", ".join(dims(entry.shape) for entry in call.outputs)
    work = count * width * (len(program) + 2 * len(tensors))
    why = f"{_WHOLE}{', and a row has one number for all of its columns' * reduces}"
    return notation(
        call, f"n!, n! {column}, {given} => {made}; touch v {count}; flop {work}; why {why}"
    )


def _own_update(call: OpCall, shards: Shards) -> LocalProgram:
    """Update the rows of the window of this rank."""
    rows, sums, tensors, program, results, lazy = call.args
    window = shards.inputs[2][0]
    builder = LocalProgramBuilder()
    if not length(window):  # a rank without rows keeps its empty shards
        return builder.program(
            *(builder("aten.clone.default", one) for one in tensors[: len(results)])
        )
    index, own, touched = builder.several(
        3, "sbp.own_rows.default", rows, sums, window[0], length(window)
    )
    values: dict[str, Ref] = {"~sums": own}
    for at, tensor in enumerate(tensors):
        values[f"~row{at}"] = builder("aten.index_select.default", tensor, 0, index)
    for outputs, op, args, named in program:
        kwargs = {key: _bound(value, values) for key, value in named}
        made = builder.several(len(outputs), op, *_bound(args, values), **kwargs)
        values |= zip(outputs, made, strict=True)
    more = (touched,) if lazy else ()
    return builder.program(
        *(
            builder("sbp.put_rows.default", tensor, index, values[name], *more)
            for tensor, name in zip(tensors, results, strict=False)
        )
    )


def _bound(argument: Argument, values: Mapping[str, Ref]) -> Argument:
    """Return an argument of a program with the values of names."""
    if isinstance(argument, tuple):
        return tuple(_bound(part, values) for part in argument)
    return values.get(argument, argument) if isinstance(argument, str) else argument


RULES = {
    "sbp.row_update": Rule(_update, _own_update),
    **by_operator({"unique_rows": Rule(_unique)}, "sbp"),
}
