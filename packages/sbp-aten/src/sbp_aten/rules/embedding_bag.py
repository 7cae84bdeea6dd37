"""Sharding rules of embedding bags: sums, means or maxima of table rows, and their gradients.

    v d, n, o! => b! d, n, b!, b!    table, indices, offsets => bags, bag of each place, sizes, ...

If the vocabulary (`v`) or the places (`n`, entries of `indices`) are split, sums and means are
partial sums. Offsets assign places to bags, so the bags themselves are not split.

Notation: see `sbp_core.signatures.notation` (`!` not split, `+` no empty shard, `x*` run of dims).
"""

from __future__ import annotations

from sbp_aten.rules.formula import by_operator, notation
from sbp_aten.rules.windows import (
    given,
    is_cut,
    length,
    only_zeros,
    readable,
    without_spare,
    writable,
)
from sbp_core.graph import Argument, Ref
from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    Notation,
    OpCall,
    Range,
    Rule,
    Shards,
    argument,
    run_as_is,
)

#: PyTorch's numbers for `mode=`.
_SUM, _MEAN, _MAX = 0, 1, 2

# Names of arguments, in order.
_FORWARD = (
    "weight indices offsets scale_grad_by_freq mode sparse per_sample_weights include_last_offset "
    "padding_idx"
)
_BACKWARD = (
    "grad indices offsets offset2bag bag_size maximum_indices num_weights scale_grad_by_freq mode "
    "sparse per_sample_weights padding_idx"
)
_WEIGHTS_BACKWARD = "grad weight indices offsets offset2bag mode padding_idx"

_BAGS = "offsets count places from the first bag on"
_MAXIMA = "a maximum comes with the row that it is from"
_COUNTS = "gradients are scaled by how often rows are named in all places"
_PADDED = "how many places of a bag are padding is known from all of them only"


def _bag(call: OpCall) -> Notation:
    """Return the notation of the forward operators; see the module docstring.

    Further labels: `c`, `m`, `t` are dims of outputs or arguments that are not split together with
    any other.
    """
    mode = argument(call, 4, "mode", _SUM)
    v = n = why = ""
    if mode == _MAX:
        v, n, why = "!", "!", _MAXIMA
    elif mode == _MEAN and argument(call, 8, "padding_idx", -1) >= 0:
        n, why = "!", _PADDED
    largest = "b! d" if len(call.outputs[3].shape) == 2 else "m!"
    # The kernel may omit the bag of each place.
    told = call.outputs[1].shape == call.inputs[1].shape
    weighted = len(call.inputs) == 4
    sums = "; linear 0 to 0" + "; linear 3 to 0" * weighted if mode != _MAX else ""
    # Sizes, and the bag of each place, do not depend on the rows.
    none = "".join(f"; reduce {label}@{output} none" for label in "vd" for output in (1, 2, 3))
    none += "; reduce n@1 none" * (not told)
    inputs = f"v{v} d, n{n}, o!" + ", n" * weighted
    outputs = f"b! d, {'n' if told else 't!'}, c!, {largest}"
    places = call.inputs[1].shape[0]
    touched = f"; touch v {places}; flop {places * call.inputs[0].shape[1]}"
    return notation(call, f"{inputs} => {outputs}{sums}{none}{touched}; why {why or _BAGS}")


def _local_offsets(builder: LocalProgramBuilder, offsets: Ref, places: Range) -> Ref:
    """Return the first places of the bags in a window (range) of the places."""
    # Bags 0 .. 3 begin at 0, 4, 4, 9 of 10 places. On a rank with places 4 .. 7, they begin at 0,
    # 0, 0, 4: the first and the last have no places there, the third has all of them.
    local = builder("aten.sub.Tensor", offsets, places[0])
    return builder("aten.clamp.default", local, 0, length(places))


def _local_padding(padding: int, rows: Range) -> int:
    """Return the index of the padding row in a window of the rows; -1 if it is outside."""
    return padding - rows[0] if rows[0] <= padding < rows[1] else -1


def _sizes(builder: LocalProgramBuilder, offsets: Ref, num_places: int, last: bool) -> Ref:
    """Return the number of places of each bag; `last`: offsets include the end of the last bag."""
    if not last:
        end = builder("aten.new_full.default", offsets, (1,), num_places)
        offsets = builder("aten.cat.default", (offsets, end))
    begin = builder("aten.slice.Tensor", offsets, 0, 0, -1)
    return builder("aten.sub.Tensor", builder("aten.slice.Tensor", offsets, 0, 1), begin)


def _bag_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Sum the rows and places of this rank; rows of other ranks have weight 0.

    The other outputs do not depend on the rows, so they are computed with an empty table.
    """
    arguments, _ = given(call, _FORWARD.split())
    weight, indices, offsets, _, mode, _, weights, last, padding = arguments
    mode, last, padding = mode or _SUM, bool(last), -1 if padding is None else padding
    num_rows, num_places = call.inputs[0].shape[0], call.inputs[1].shape[0]
    rows, places = shards.inputs[0][0], shards.inputs[1][0]
    if not is_cut(rows, num_rows) and not is_cut(places, num_places):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    begins = _local_offsets(builder, offsets, places) if is_cut(places, num_places) else offsets
    # All rows, but no columns: the kernel counts with unchanged indices, at hardly any cost.
    bare = builder("aten.new_zeros.default", weight, (num_rows, 0))
    _, bag_of, sizes, largest = builder.several(
        4, call.op, bare, indices, begins, False, mode, False, None, last, padding
    )
    # No rows: there is no row to redirect indices of other ranks' rows to.
    if rows[0] == rows[1]:
        made = builder("aten.new_zeros.default", weight, shards.output_shape())
        return builder.program(made, bag_of, sizes, largest)
    # An index outside of the window reads row 0 of it, with weight 0.
    if is_cut(rows, num_rows):
        indices, outside = readable(builder, indices, rows)
        if weights is None:
            weights = builder("aten.new_ones.default", weight, (length(places),))
        weights = builder("aten.masked_fill.Scalar", weights, outside, 0)
    local = _local_padding(padding, rows)
    # Means are computed as sums here, and divided by the sizes of whole bags below: means of parts
    # would not add up.
    made, *_ = builder.several(
        4, call.op, weight, indices, begins, False, _SUM, False, weights, last, local
    )
    if mode == _MEAN:
        counts = _sizes(builder, offsets, num_places, last) if is_cut(places, num_places) else sizes
        counts = builder("aten.clamp.default", counts, 1)
        made = builder("aten.div.Tensor", made, builder("aten.unsqueeze.default", counts, -1))
    return builder.program(made, bag_of, sizes, largest)


def _table_gradient(call: OpCall) -> Notation:
    """Return the notation of `_embedding_bag_backward` or `_embedding_bag_dense_backward`.

    Sums and means: `b! d, n, o!, n, b!, b! => v d`, as each place adds to its row.
    Maxima: `b d, n!, o!, n!, b, b d => v d`, as each bag adds to a row for each column.
    """
    names = _names(call)
    mode = argument(call, names.index("mode"), "mode")
    largest = mode == _MAX
    scaled = not largest and bool(
        argument(call, names.index("scale_grad_by_freq"), "scale_grad_by_freq", False)
    )
    b, n, v = "!" * (not largest), "!" * (largest or scaled), "!" * scaled
    told = call.inputs[names.index("offset2bag")].shape == call.inputs[1].shape
    maxima = call.inputs[5 if "offsets" in names else 4].shape
    dims = {
        "grad": f"b{b} d",
        "indices": f"n{n}",
        "offsets": "o!",
        "offset2bag": f"n{n}" if told else "t!",
        "bag_size": f"b{b}",
        "maximum_indices": f"b{b} d" if len(maxima) == 2 else "m!",
        "per_sample_weights": f"n{n}",
    }
    inputs = [name for name in dims if name in names][: len(call.inputs)]
    # Arguments that the kernel does not read in this mode may be split in any way.
    unused = ["indices", "offset2bag"] if largest else ["maximum_indices"]
    unused += ["offsets"] * told + ["bag_size"] * (mode == _SUM)
    own = [name for name in inputs if name in unused]
    dims |= {name: f"{name}_*" for name in own}
    clauses = ["linear 0"]
    if inputs[-1] == "per_sample_weights":
        clauses.append(f"linear {len(inputs) - 1}")
    clauses += [f"ignored {inputs.index(name)}" for name in own]
    clauses += [f"reduce {name}_* none" for name in own]
    why = _MAXIMA if largest else _COUNTS if scaled else _BAGS
    left = ", ".join(dims[name] for name in inputs)
    return notation(call, "; ".join([f"{left} => v{v} d", *clauses, f"why {why}"]))


def _names(call: OpCall) -> list[str]:
    absent = ("offsets", "sparse") if "dense" in call.op else ()
    return [name for name in _BACKWARD.split() if name not in absent]


def _table_gradient_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Let places of other windows add to a spare row, and offsets count local places."""
    names = _names(call)
    values: dict[str, Argument] = dict(zip(names, given(call, names)[0], strict=True))
    num_rows, num_places = call.outputs[0].shape[0], call.inputs[1].shape[0]
    rows, places = shards.outputs[0][0], shards.inputs[1][0]
    if values["padding_idx"] is None:
        values["padding_idx"] = -1
    builder = LocalProgramBuilder()
    if is_cut(places, num_places) and "offsets" in names:
        values["offsets"] = _local_offsets(builder, values["offsets"], places)
    if is_cut(rows, num_rows):
        for name in ("indices", "maximum_indices"):
            values[name] = writable(builder, values[name], rows)
        # One spare row after the window takes the updates of other ranks' rows, and is cut off.
        values["num_weights"] = length(rows) + 1
        values["padding_idx"] = _local_padding(values["padding_idx"], rows)
    made = builder(call.op, *values.values())
    if is_cut(rows, num_rows):
        made = without_spare(builder, made, {0: rows})
    return builder.program(made)


def _weights_gradient(call: OpCall) -> Notation:
    """Return the product of a bag's gradient and a place's row."""
    told = call.inputs[4].shape == call.inputs[2].shape
    inputs = f"b! d, v d, n, o!, {'n' if told else 't!'}"
    clauses = "linear 0; linear 1" + "; unread 3" * told
    return notation(call, f"{inputs} => n; {clauses}; why {_BAGS}")


def _weights_gradient_shard(call: OpCall, shards: Shards) -> LocalCall | LocalProgram:
    """Take the products with the rows of the window; other places get zeros."""
    arguments, _ = given(call, _WEIGHTS_BACKWARD.split())
    gradient, weight, indices, offsets, bag_of, mode, padding = arguments
    rows, places = shards.inputs[1][0], shards.inputs[2][0]
    cut = is_cut(rows, call.inputs[1].shape[0])
    if not cut and not is_cut(places, call.inputs[2].shape[0]):
        return run_as_is(call)
    if rows[0] == rows[1]:
        return only_zeros(gradient, shards.output_shape())
    builder = LocalProgramBuilder()
    begins = _local_offsets(builder, offsets, places)
    local = _local_padding(-1 if padding is None else padding, rows)
    if not cut:
        made = builder(call.op, gradient, weight, indices, begins, bag_of, mode, local)
        return builder.program(made)
    indices, outside = readable(builder, indices, rows)
    made = builder(call.op, gradient, weight, indices, begins, bag_of, mode, local)
    return builder.program(builder("aten.masked_fill.Scalar", made, outside, 0))


RULES = by_operator(
    {
        "_embedding_bag _embedding_bag_forward_only": Rule(_bag, _bag_shard),
        "_embedding_bag_backward _embedding_bag_dense_backward": Rule(
            _table_gradient, _table_gradient_shard
        ),
        "_embedding_bag_per_sample_weights_backward": Rule(
            _weights_gradient, _weights_gradient_shard
        ),
    }
)
