"""Sharding rules of updates of the rows of a table that a step has looked up.

    sbp.unique_rows(indices, gradients)      i*!, i*! d => n!, n! d      rows, and sums by row
    sbp.row_update(rows, sums, tensors, program, results)
                                             n!, n! d, v d, v 1 => v d, v 1
    sbp.own_rows, sbp.put_rows               only in plans

A table may be split by rows, and then each rank updates its own rows, or by columns, unless the
program reduces them. Lookups are whole: one row may be looked up on several ranks, whose gradients
have to be added before the update uses them.

The program is the update of one row, as calls (outputs, operator, args, kwargs) whose values have
names: `~sums0` is the first gradient, `~row0` the row of the first tensor. `Ref`s are host numbers,
or 0-d tensors, from outside. `results` names the new row of each of the first tensors.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sbp_aten.rules.formula import by_operator, notation
from sbp_aten.rules.windows import length
from sbp_aten.traits import ROW_REDUCTIONS
from sbp_core.graph import Argument, Ref
from sbp_core.signatures import (
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Rule,
    Shards,
)

_WHOLE = "a row may be looked up in several places, whose gradients are added first"


def _unique(call: OpCall) -> Notation:
    """`i*!, i*! d, .. => n!, n! d, ..`: linear in each gradient."""
    given, made, clauses = ["i*!"], ["n!"], []
    for at in range(1, len(call.inputs)):
        given.append(f"i*! d{at}")
        made.append(f"n! d{at}")
        others = (other for other in range(len(call.outputs)) if other != at)
        clauses += [f"linear {at} to {at}", *(f"reduce d{at}@{other} none" for other in others)]
    work = sum(prod(entry.shape) for entry in call.inputs)
    return notation(
        call,
        f"{', '.join(given)} => {', '.join(made)}; {'; '.join(clauses)}; reduce i*@0 none; "
        f"flop {work}; why {_WHOLE}",
    )


def _update(call: OpCall) -> Notation:
    """`n!, n! d, v d, v 1, () => v d, v 1`, as elementwise as its program is."""
    _, sums, tensors, program, _ = call.args
    reduces = any(op.split(".")[1] in ROW_REDUCTIONS for _, op, _, _ in program)
    column = "d!" if reduces else "d"
    first = 1 + len(sums)
    width = call.inputs[first].shape[1]

    def dims(shape: tuple[int, ...], rows: str) -> str:
        return f"{rows} {column if shape[1] == width else '1'}" if shape else "()"

    count = call.inputs[0].shape[0]
    given = [
        "n!",
        *(dims(entry.shape, "n!") for entry in call.inputs[1:first]),
        *(dims(entry.shape, "v") for entry in call.inputs[first:]),
    ]
    made = ", ".join(dims(entry.shape, "v") for entry in call.outputs)
    work = count * width * (len(program) + 2 * len(tensors))
    why = f"{_WHOLE}{', and a row has one number for all of its columns' * reduces}"
    return notation(call, f"{', '.join(given)} => {made}; touch v {count}; flop {work}; why {why}")


def _own_update(call: OpCall, shards: Shards) -> LocalProgram:
    """Update the rows of the window of this rank."""
    rows, sums, tensors, program, results = call.args
    window = shards.outputs[0][0]
    builder = LocalProgramBuilder()
    if not length(window):  # a rank without rows keeps its empty shards
        kept = tensors[: len(results)]
        return builder.program(*(builder("aten.clone.default", one) for one in kept))
    index, *own = builder.several(
        1 + len(sums), "sbp.own_rows.default", rows, sums, window[0], length(window)
    )
    values: dict[str, Ref] = {f"~sums{at}": one for at, one in enumerate(own)}
    for at, tensor in enumerate(tensors):
        values[f"~row{at}"] = builder("aten.index_select.default", tensor, 0, index)
    for outputs, op, args, named in program:
        kwargs = {key: _bound(value, values) for key, value in named}
        made = builder.several(len(outputs), op, *_bound(args, values), **kwargs)
        values |= zip(outputs, made, strict=True)
    pairs = zip(tensors, results, strict=False)
    return builder.program(
        *(builder("sbp.put_rows.default", one, index, values[name]) for one, name in pairs)
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
