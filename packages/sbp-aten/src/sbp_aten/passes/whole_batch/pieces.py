"""Split a loop over the samples of a batch, unrolled in the captured step, into micro-batches.

    for row in x: rows.append(f(row))       f(x[0]), f(x[1]), f(x[2]), f(x[3])

A micro-batch runs the iterations of its own samples. That gives the whole batch if all
micro-batches run the same calls, and the results of all pieces are joined in their order by
`stack`, `cat` or a sum. Equal calls are written once. So all micro-batches run the same calls if,
and only if, the pieces at one place have one name in all of them. The result of a single piece
(`err[0]`) differs between micro-batches, and is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp_aten.passes.whole_batch.layout import (
    SAME,
    Coefficient,
    LinearTerm,
    PartValue,
    SamplePiece,
    Samples,
    Total,
    part_type,
)
from sbp_aten.passes.whole_batch.micro_batch import MicroBatchBuilder
from sbp_aten.passes.whole_batch.rearranged import is_zero
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, map_refs
from sbp_core.signatures import OpCall, argument, wrap_dim

_TAKES = ("select", "slice", "split", "split_with_sizes", "unbind")
_JOINS = ("cat", "stack")
_SUMS = (
    "aten.add.Scalar",
    "aten.add.Tensor",
    "aten.rsub.Scalar",
    "aten.sub.Scalar",
    "aten.sub.Tensor",
)
_BACKWARDS = ("select_backward", "slice_backward")


def taken_apart(
    parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]
) -> list[PartValue] | None:
    """Return the pieces of samples that a call takes: all of them, or one."""
    if node.kind not in _TAKES or not isinstance(given[0].layout, Samples):
        return None
    (one,), layout = given, given[0].layout
    shape = parts.graph.tensor(node.args[0].name).shape
    call = OpCall.of(parts.graph, node)
    where = 2 if node.kind.startswith("split") else 1
    if layout.blocks > 1 or wrap_dim(argument(call, where, "dim", 0), len(shape)) != layout.dim:
        return None
    extent = shape[layout.dim]
    if node.kind in ("select", "slice"):
        first, last = _bounds(parts.graph, node, extent)
    elif node.kind == "unbind":
        first, last = 0, 1
    else:
        sizes = {parts.graph.tensor(value).shape[layout.dim] for value in node.outputs}
        first, last = 0, (sizes.pop() if len(sizes) == 1 else 0)
    each, own = last - first, extent // parts.num_parts
    if each < 1 or first % each or own % each:
        return None
    count = own // each
    ref, dim = Ref(one.name), layout.dim
    made = [parts.graph.tensor(value) for value in node.outputs]
    parts.loops[node.name] = count
    takes_one = node.kind in ("select", "slice")
    if count == 1 and node.kind not in ("select", "unbind"):  # all of a micro-batch
        numbers = [first // each] if takes_one else range(len(node.outputs))
        return [PartValue(one.name, SamplePiece(0, at, 1)) for at in numbers]
    if takes_one:
        micro_batch, place = divmod(first // each, count)
        index = place * each
        stop = () if node.kind == "select" else (index + each,)
        names = parts.add_merged(replace(node, args=(ref, dim, index, *stop)), made)
        return [PartValue(names[0], SamplePiece(place, micro_batch, count))]
    own_turns = replace(node, args=(ref, dim), kwargs={}, outputs=node.outputs[:count])
    if node.kind != "unbind":
        own_turns = replace(
            own_turns, op="aten.split_with_sizes.default", args=(ref, (each,) * count, dim)
        )
    names = parts.add_merged(own_turns, made[:count])
    return [
        PartValue(names[at % count], SamplePiece(at % count, at // count, count))
        for at in range(len(node.outputs))
    ]


def of_numbers(parts: MicroBatchBuilder, node: Node) -> list[PartValue] | None:
    """Return the pieces of constants in the backward phase of a loop, such as ones; else None.

    They are the same in every micro-batch, with one for each piece of the whole batch.
    """
    joined = parts.joins.get(node.forward)
    if joined is not None and node.kind in _TAKES:
        part = parts.slice_constant(node.args[0].name, joined)
        return None if part is None else taken_apart(parts, node, [PartValue(part, joined)])
    count = parts.loops.get(node.forward)
    if count is None:
        return None
    if node.kind in _JOINS:
        given = [
            PartValue(parts.first_equal(ref.name), SamplePiece(at % count, at // count, count))
            for at, ref in enumerate(node.args[0])
        ]
        return _joined(parts, node, given)
    if node.kind not in _BACKWARDS:
        return None
    gradient, sizes, dim, first = node.args[:4]
    each = sizes[dim] // (count * parts.num_parts)
    micro_batch, place = divmod(first % sizes[dim] // each, count)
    number = PartValue(parts.first_equal(gradient.name))
    return _put_back(parts, node, number, SamplePiece(place, micro_batch, count))


def of_pieces(
    parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]
) -> list[PartValue] | None:
    """Return the result of a call on pieces: on a single one, or on all that it joins."""
    layouts = {one.layout for one in given if one.layout != SAME}
    if node.kind in _JOINS and len(layouts) == len(given) > 1:
        return _joined(parts, node, given)
    (layout, *others) = layouts
    if others or not isinstance(layout, SamplePiece) or layout.dim is not None:
        return None
    if "seeded" in node.tags:  # equal calls draw different numbers
        return None
    names: dict[str, PartValue] = {}
    for name, one in zip(parts.graph.tensor_inputs(node), given, strict=True):
        part = PartValue(parts.first_equal(one.name)) if one.layout == SAME else one
        if names.setdefault(name, part) != part:
            return None  # one tensor, given twice, as different parts
    made = [parts.graph.tensor(value) for value in node.outputs]
    if node.kind in _BACKWARDS and node.forward in parts.loops:
        return _put_back(parts, node, names[node.args[0].name], layout)
    of_zero = _of_zero(parts, node, names, layout)
    if of_zero is not None:
        return of_zero
    args = _renamed(node.args, names)
    kwargs = {key: _renamed(value, names) for key, value in node.kwargs.items()}
    outputs = parts.add_merged(replace(node, args=args, kwargs=kwargs), made)
    return [PartValue(name, layout) for name in outputs]


def completed(
    parts: MicroBatchBuilder, node: Node, terms: Sequence[LinearTerm]
) -> list[LinearTerm]:
    """Return terms in which the sum of all pieces is merged into one term: a total, or samples.

    Args:
        parts: Writes the sum.
        node: The node for which it is written.
        terms: Terms of one value.
    """
    groups: dict[tuple[Coefficient, int, int | None], list[PartValue]] = {}
    found = []
    for term in terms:
        layout = term.part.layout
        if isinstance(layout, SamplePiece):
            key = (term.coefficient, layout.count, layout.dim)
            groups.setdefault(key, []).append(term.part)
        else:
            found.append(term)
    for (coefficient, _, dim), some in groups.items():
        ordered, added = _without_starts(parts, sorted(some, key=_order))
        names = _in_order(parts, ordered, dim)
        if names is None:
            found += [LinearTerm(coefficient, part) for part in some]
            continue
        found += [LinearTerm(coefficient, PartValue(name)) for name in added]
        total = names[0]
        for name in names[1:]:
            kind = parts.types[total]
            assert isinstance(kind, TensorType)
            (total,) = parts.add_merged(
                replace(
                    node,
                    op="aten.add.Tensor",
                    args=(Ref(total), Ref(name)),
                    kwargs={},
                    outputs=node.outputs[:1],
                    tags=("pointwise",),
                ),
                [kind],
            )
        found.append(
            LinearTerm(coefficient, PartValue(total, Total() if dim is None else Samples(dim)))
        )
    return found


def _bounds(graph: LogicalGraph, node: Node, extent: int) -> tuple[int, int]:
    """Return the first index that `select` or `slice` takes, and the one after the last."""
    if node.kind == "select":
        index = node.args[2] % extent
        return index, index + 1
    call = OpCall.of(graph, node)
    start, stop = argument(call, 2, "start", None), argument(call, 3, "end", None)
    first, last, step = slice(start, stop, argument(call, 4, "step", 1)).indices(extent)
    return (first, last) if step == 1 else (0, 0)


def _order(part: PartValue) -> tuple[int, int]:
    assert isinstance(part.layout, SamplePiece)
    return part.layout.micro_batch, part.layout.place


def _in_order(
    parts: MicroBatchBuilder, given: Sequence[PartValue], dim: int | None = None
) -> list[str] | None:
    """Return the pieces of every micro-batch if they are the whole batch in order; else None."""
    first = given[0].layout
    if not isinstance(first, SamplePiece) or len(given) != first.count * parts.num_parts:
        return None
    own = [one.name for one in given[: first.count]]
    for at, one in enumerate(given):
        micro_batch, place = divmod(at, first.count)
        if one != PartValue(own[place], SamplePiece(place, micro_batch, first.count, dim)):
            return None
    return own


def _without_starts(
    parts: MicroBatchBuilder, given: Sequence[PartValue]
) -> tuple[list[PartValue], list[str]]:
    """Return the addends of a sum over all pieces without its start value, and the start value.

    The first iteration of `for row in x: total = total + f(row)` makes start + f(x[0]). It looks
    like any piece, until the other pieces turn out to lack the start.
    """
    found, added = list(given), list[str]()
    first = given[0].layout
    if not isinstance(first, SamplePiece) or len(given) != first.count * parts.num_parts:
        return found, added
    places: dict[int, list[int]] = {}
    for at, one in enumerate(given):
        if isinstance(one.layout, SamplePiece):
            places.setdefault(one.layout.place, []).append(at)
    for alike in places.values():
        for wanted in dict.fromkeys(given[at].name for at in alike):
            starts = [_starts(parts, given[at].name, wanted) for at in alike]
            known = [one for one in starts if one is not None]
            if len(known) == len(starts):
                for at in alike:
                    found[at] = replace(given[at], name=wanted)
                added += [start for one in known for start in one]
                break
    return found, added


def _starts(parts: MicroBatchBuilder, value: str, wanted: str) -> list[str] | None:
    """Return the values added to one piece to make another; None if it is no such sum."""
    if value == wanted:
        return []
    node = parts.makers.get(value)
    if node is None or node.op not in ("aten.add.Tensor", "aten.sub.Tensor") or node.kwargs:
        return None
    kind = parts.types[value]
    places = [
        at for at, one in enumerate(node.args) if isinstance(one, Ref) and one.name in parts.same
    ]
    if len(node.args) != 2 or len(places) != 1 or parts.types[node.args[places[0]].name] != kind:
        return None
    (place,) = places
    start, piece = node.args[place], node.args[1 - place]
    assert isinstance(kind, TensorType)
    negative = replace(node, op="aten.neg.default", tags=("pointwise",))
    if node.kind == "sub" and place == 0:
        (name,) = parts.add_merged(replace(negative, args=(piece,)), [kind])
        piece = Ref(name)
    earlier = _starts(parts, piece.name, wanted) if isinstance(piece, Ref) else None
    if earlier is None:
        return None
    if node.kind == "sub" and place == 1:
        name = parts.fresh(f"{start.name}.negative")
        parts.add_constant(replace(negative, name=name, args=(start,), outputs=(name,)), kind)
        start = Ref(name)
    return [*earlier, start.name]


def _joined(
    parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]
) -> list[PartValue] | None:
    """Return all samples, joined from their pieces by a call."""
    names = _in_order(parts, given)
    if names is None:
        return None
    (value,) = node.outputs
    kind = parts.graph.tensor(value)
    shapes = {parts.graph.tensor(ref.name).shape for ref in node.args[0]}
    dim = wrap_dim(argument(OpCall.of(parts.graph, node), 1, "dim", 0), len(kind.shape))
    if len(shapes) > 1:
        return None
    made = part_type(kind, Samples(dim), parts.num_parts)
    parts.joins[node.name] = Samples(dim)
    if len(names) == 1 and node.kind == "cat":
        return [PartValue(names[0], Samples(dim))]
    (name,) = parts.add_merged(replace(node, args=(tuple(map(Ref, names)), dim), kwargs={}), [made])
    return [PartValue(name, Samples(dim))]


def _put_back(
    parts: MicroBatchBuilder, node: Node, gradient: PartValue, layout: SamplePiece
) -> list[PartValue] | None:
    """Return the gradient of samples from which one piece was taken: zeros elsewhere."""
    sizes, dim, first = node.args[1:4]
    dim = wrap_dim(dim, len(sizes))
    each = sizes[dim] // (layout.count * parts.num_parts)
    if first % sizes[dim] != (layout.micro_batch * layout.count + layout.place) * each:
        return None
    (value,) = node.outputs
    kind = part_type(parts.graph.tensor(value), Samples(dim), parts.num_parts)
    start = layout.place * each
    rest = (start,) if node.kind == "select_backward" else (start, start + each, 1)
    args = (Ref(gradient.name), kind.shape, dim, *rest)
    (name,) = parts.add_merged(replace(node, args=args, kwargs={}), [kind])
    return [PartValue(name, replace(layout, dim=dim))]


def _of_zero(
    parts: MicroBatchBuilder, node: Node, given: dict[str, PartValue], layout: SamplePiece
) -> list[PartValue] | None:
    """Return the result of adding a piece to zero, or subtracting it: a sum's first iteration."""
    if node.op not in _SUMS or node.kwargs or len(node.args) > 2:
        return None
    first, second = node.args if node.kind != "rsub" else reversed(node.args)
    pieces = [one for one in (first, second) if _part(one, given).layout == layout]
    made = parts.graph.tensor(node.outputs[0])
    if len(pieces) != 1 or parts.graph.tensor(pieces[0].name) != made:
        return None
    other = second if pieces[0] is first else first
    if not (is_zero(parts.graph, other.name) if isinstance(other, Ref) else other == 0):
        return None
    if node.kind == "add" or other is second:
        return [_part(pieces[0], given)]
    ref = Ref(_part(pieces[0], given).name)
    (name,) = parts.add_merged(replace(node, op="aten.neg.default", args=(ref,)), [made])
    return [PartValue(name, layout)]


def _part(value: Argument, given: dict[str, PartValue]) -> PartValue:
    return given[value.name] if isinstance(value, Ref) else PartValue("")


def _renamed(value: Argument, names: dict[str, PartValue]) -> Argument:
    return map_refs(value, lambda ref: Ref(names[ref.name].name) if ref.name in names else ref)
