"""Write the calls of a micro-batch for reshapes, concatenations and indexing of the whole batch.

No sharding rule covers these calls, because ranks would have to communicate for them; micro-batches
need not. `PartCalls` tries the functions in `WAYS`:

    reshape       samples keep their order, along whatever dim
    cat, slice    blocks of all samples are joined, or separated again
    index         by the number of each sample, which in a part is counted from 0
    bags          with equally many places for each sample
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from sbp_aten.passes.whole_batch.layout import (
    SAME,
    Layout,
    PartValue,
    Samples,
    Total,
    part_shape,
    reshaped,
)
from sbp_aten.passes.whole_batch.micro_batch import MicroBatchBuilder
from sbp_aten.traits import TRAITS, filled_with
from sbp_core.graph import Argument, LogicalGraph, Node, Ref
from sbp_core.signatures import LocalCall, LocalProgram, OpCall, argument, wrap_dim

#: Operators that keep all elements, in their order.
RESHAPES = ("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view")

_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")

#: Gradients of bags -> positions of `scale_grad_by_freq` and of the mode.
_BAG_GRADIENTS = {"_embedding_bag_backward": (7, 8), "_embedding_bag_dense_backward": (6, 7)}

#: The mode "max" of a bag.
_LARGEST = 2

_BLOCKS = ("cat", "repeat", "slice", "slice_backward", "split", "split_with_sizes")

#: Program of a part, the parts that it reads, and the layouts of its results.
Found = tuple[LocalProgram, list[Ref], list[Layout]]


def _single(node: Node, args: tuple[Argument, ...], op: str = "") -> LocalProgram:
    return LocalProgram(calls=(LocalCall(op=op or node.op, args=args, kwargs=node.kwargs),))


def as_reshaped(parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]) -> Found | None:
    """Return the program of a reshape of samples: the same reshape for the shape of a part."""
    if node.kind not in RESHAPES or not isinstance(given[0].layout, Samples):
        return None
    (value,) = node.outputs
    before = parts.graph.tensor(node.args[0].name).shape
    after = parts.graph.tensor(value).shape
    layout = reshaped(given[0].layout, before, after, parts.num_parts)
    if layout is None:
        return None
    args = (node.args[0], part_shape(after, layout, parts.num_parts))
    # In a part, a dim with a single sample would be squeezed, too.
    op = "aten.reshape.default" if node.kind == "squeeze" else node.op
    program = _single(node, node.args if node.kind == "unsqueeze" else args, op)
    return program, [Ref(given[0].name)], [layout]


def in_blocks(parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]) -> Found | None:
    """Return the program that joins blocks of all samples, or separates them again.

    cat([a, b]), repeat(a, 2)                 of a, b: one block each, to two blocks
    slice(x, 0, B, 2 * B), split(x, B)        one block of two
    slice_backward(g, [2 * B, ..], 0, B, 2 * B)
    """
    graph, count = parts.graph, parts.num_parts
    first = next((one.layout for one in given if isinstance(one.layout, Samples)), SAME)
    if not isinstance(first, Samples) or node.kind not in _BLOCKS:
        return None
    refs = [Ref(one.name) for one in given]
    shapes = [graph.tensor(value).shape for value in graph.tensor_inputs(node)]
    at = first.dim
    shape = next(
        size for one, size in zip(given, shapes, strict=True) if isinstance(one.layout, Samples)
    )
    run = shape[at] // first.blocks
    call = OpCall.of(graph, node)
    if node.kind == "cat":
        dim = wrap_dim(argument(call, 1, "dim", 0), len(shape))
        if dim != at:
            return None
        blocks = []
        for index, (one, size) in enumerate(zip(given, shapes, strict=True)):
            blocks.append(size[at] // run)
            layout = Samples(at, blocks[-1])
            if size[at] % run or one.layout not in (layout, SAME):
                return None
            if one.layout == SAME:
                part = parts.slice_constant(one.name, layout)
                if part is None:
                    return None
                refs[index] = Ref(part)
        return _single(node, node.args), refs, [Samples(at, sum(blocks))]
    if node.kind == "repeat":
        repeats = tuple(node.args[1])
        dim = at + len(repeats) - len(shape)
        return _single(node, node.args), refs, [Samples(dim, first.blocks * repeats[dim])]
    if node.kind == "slice_backward":
        sizes, dim, start, stop, step = node.args[1:]
        dim = wrap_dim(dim, len(sizes))
        bounds = _whole_runs(sizes[dim], start, stop, run)
        if dim != at or step != 1 or bounds is None:
            return None
        local = part_shape(tuple(sizes), first, count)
        args = (node.args[0], local, dim, *(one // count for one in bounds), step)
        return _single(node, args), refs, [Samples(at, sizes[at] // run)]
    dim = wrap_dim(argument(call, 1 if node.kind == "slice" else 2, "dim", 0), len(shape))
    if dim != at or node.kwargs:
        return None
    if node.kind == "slice":
        start, stop = argument(call, 2, "start", None), argument(call, 3, "end", None)
        bounds = _whole_runs(shape[at], start, stop, run)
        if bounds is None or argument(call, 4, "step", 1) != 1:
            return None
        args = (node.args[0], dim, *(one // count for one in bounds))
        return _single(node, args), refs, [Samples(at, (bounds[1] - bounds[0]) // run)]
    sizes = [graph.tensor(value).shape[at] for value in node.outputs]
    if any(one % run for one in sizes):
        return None
    op = "aten.split_with_sizes.default"
    args = (node.args[0], tuple(one // count for one in sizes), dim)
    return _single(node, args, op), refs, [Samples(at, one // run) for one in sizes]


def _whole_runs(extent: int, start: int | None, stop: int | None, run: int) -> list[int] | None:
    """Return the bounds of a slice; None if it cuts a block of samples."""
    first, last, _ = slice(start, stop).indices(extent)
    return [first, last] if first % run == 0 and last % run == 0 and first < last else None


def as_numbered(parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]) -> Found | None:
    """Return the program of reading or writing by sample numbers: `x[arange(B), i]`.

    A part reads its own samples, numbered from 0.
    """
    if node.kind not in ("index", "index_put", "_unsafe_index_put"):
        return None
    graph = parts.graph
    names = graph.tensor_inputs(node)
    layout = given[0].layout
    writes = node.kind != "index"
    places = [at for at, one in enumerate(node.args[1]) if one is not None]
    indices = [node.args[1][at].name for at in places]
    if writes and layout == SAME and is_zero(graph, names[0]):
        layout = Samples(places[0])
    if not isinstance(layout, Samples) or layout.blocks > 1 or layout.dim not in places:
        return None
    if any(graph.tensor(name).dtype == "bool" for name in indices):
        return None
    wide = max(len(graph.tensor(name).shape) for name in indices)
    numbers = names[1 + places.index(layout.dim)]
    extent = graph.tensor(names[0]).shape[layout.dim]
    # Dim of the sample numbers among the dims of all indices, counted from the last.
    shape = graph.tensor(numbers).shape
    found = [
        at - len(shape) for at, one in enumerate(shape) if one == extent and prod(shape) == one
    ]
    if len(found) != 1 or numbers not in parts.same or not _is_count(graph, numbers, extent):
        return None
    refs: list[Ref] = []
    for name, one in zip(names, given, strict=True):
        dims = len(graph.tensor(name).shape)
        part: str | None = one.name
        at = dims + found[0]
        if name == numbers:
            part = parts.slice_constant(name, Samples(at), numbers=True)
        elif name in indices and one.layout == SAME and at >= 0:
            if graph.tensor(name).shape[at] != 1:
                part = parts.slice_constant(name, Samples(at))
        elif name in indices and one.layout != SAME and one.layout != Samples(at):
            return None
        elif name == names[0] and one.layout == SAME:
            part = parts.slice_constant(name, layout)
        if part is None:
            return None
        refs.append(Ref(part))
    dense = places == list(range(places[0], places[-1] + 1))
    made = Samples((places[0] if dense else 0) + wide + found[0])
    if not writes:
        return _single(node, node.args), refs, [made]
    # Values may be broadcast: fewer dims than their places, or one entry for all.
    shape = graph.tensor(names[-1]).shape
    at = made.dim - (len(graph.tensor(names[0]).shape) - len(places) + wide) + len(shape)
    alike = at < 0 or shape[at] == 1
    part = refs[-1].name
    if given[-1].layout == SAME and not alike:
        part = parts.slice_constant(part, Samples(at))
    elif given[-1].layout != (SAME if alike else Samples(at)):
        return None
    if part is None:
        return None
    return _single(node, node.args), [*refs[:-1], Ref(part)], [layout]


def without_views(graph: LogicalGraph, value: str) -> str:
    """Return the source of a value, before reshapes and casts."""
    node = graph.producers.get(value)
    while node is not None and (node.kind in RESHAPES or node.kind in TRAITS.copies):
        value = graph.tensor_inputs(node)[0]
        node = graph.producers.get(value)
    return value


def _is_count(graph: LogicalGraph, value: str, extent: int, each: int = 1) -> bool:
    """Whether a value is `each` times 0, 1, ..., extent - 1, up to reshapes and casts."""
    value = without_views(graph, value)
    node = graph.producers.get(value)
    if node is None or node.kind != "arange":
        return False
    start, step = 0, 1
    call = OpCall.of(graph, node)
    if node.op != "aten.arange.default":
        start = argument(call, 0, "start")
    if node.op.endswith("start_step"):
        step = argument(call, 2, "step", 1)
    return start == 0 and step == each and graph.tensor(value).shape == (extent,)


def _of_bags(parts: MicroBatchBuilder, node: Node, given: Sequence[PartValue]) -> Found | None:
    """Return the program of bags with equally many places a sample, or of their gradient."""
    names = parts.graph.tensor_inputs(node)
    shapes = [parts.graph.tensor(name).shape for name in names]
    if node.kind in _BAGS:
        offsets, fixed = names[2], {0}
        bags, places = shapes[2][0], shapes[1][0]
    elif node.kind in _BAG_GRADIENTS:
        scaled, mode = _BAG_GRADIENTS[node.kind]
        if node.args[scaled] or node.args[mode] == _LARGEST:
            return None
        offsets, fixed = names[2] if "dense" not in node.kind else "", set()
        bags, places = shapes[0][0], shapes[1][0]
    else:
        return None
    if not bags or places % bags:
        return None
    refs = []
    for at, (name, one, shape) in enumerate(zip(names, given, shapes, strict=True)):
        part: str | None = one.name
        if name == offsets:
            numbered = _is_count(parts.graph, name, bags, places // bags)
            part = parts.slice_constant(name, Samples(0), numbers=True) if numbered else None
        elif one.layout != (SAME if at in fixed or not prod(shape) else Samples(0)):
            part = None
        if part is None:
            return None
        refs.append(Ref(part))
    if node.kind in _BAG_GRADIENTS:
        return _single(node, node.args), refs, [Total()]
    made = [parts.graph.tensor(value).shape for value in node.outputs]
    layouts: list[Layout] = [Samples(0) if prod(shape) else SAME for shape in made]
    return _single(node, node.args), refs, layouts


def is_zero(graph: LogicalGraph, value: str) -> bool:
    """Whether a value is a tensor of zeros."""
    node = graph.producers.get(value)
    return node is not None and bool(filled_with(node) == 0)


#: Functions that find a program, in the order in which they are tried.
WAYS = (as_reshaped, in_blocks, as_numbered, _of_bags)
