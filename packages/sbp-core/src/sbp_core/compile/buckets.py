"""Buckets: small tensors that are boxed alike travel in one flat buffer.

before: g1@(B) = all-reduce(g1)                      two calls, two latencies
        g2@(B) = all-reduce(g2)
after:  flat = pack(g1, g2)                          one copy of each
        sums = all-reduce(flat)
        g1@(B), g2@(B) = unpack(sums)                views

Also reduce-scatters of gradients, reductions of several arguments of one node, and all-gathers: of
new parameter values whose updates are sharded, and of the parameters of one block that are gathered
for their use. On n ranks a packed value is n rows, one for each rank of its group, so that what a
reduce-scatter leaves on a rank, and what an all-gather takes from it, is one row:

    reduce-scatter of a (2, 3) split by rows and b (4,)     rank 0 | a[0], b[:2]
                                                            rank 1 | a[1], b[2:]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from sbp_core.boxing import Step, StepKind
from sbp_core.boxing.price import step_time_s
from sbp_core.boxing.slices import bounds_of, collective_bytes, itemsize, uniform_bytes
from sbp_core.cluster import Cluster
from sbp_core.compile.items import Held, Item, ItemKind, Lowered
from sbp_core.compile.levels import is_gathered_on_use, with_levels
from sbp_core.compile.physical import Instruction
from sbp_core.graph.blocks import block_of
from sbp_core.graph.ir import LogicalGraph, Phase, Rate, Ref, Symbol, TensorType
from sbp_core.graph.primitives import CAT, CLONE, PERMUTE, RESHAPE, SPLIT_WITH_SIZES, VIEW
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, Partial, S, Sbp, local_shape

#: Of the time of a call, the part that its latency may take; below that, packing more gains little.
_LATENCY_SHARE = 0.1

#: The bucket where no machine is known: what takes ten latencies of 100 us at 10 GB/s.
_ROUGH_BUCKET_BYTES = 10_000_000

#: Sizes that a price is asked for: powers of two.
_SMALLEST, _LARGEST = 1 << 12, 1 << 28


def bucket(
    graph: LogicalGraph, lowered: Lowered, bucket_bytes: int | None, cluster: Cluster | None = None
) -> Lowered:
    """Return the items with buckets; bytes moved stay the same.

    Args:
        graph: What was lowered.
        lowered: Without buckets.
        bucket_bytes: Most bytes of a buffer on a rank; 0 for no buckets, None for as many as the
            price of the step says: more would save less than a tenth of its time.
        cluster: The machine that says prices; rough ones without.
    """
    if bucket_bytes == 0:
        return lowered
    from_states = _from_states(graph, lowered.items)
    groups = list(_groups(graph, lowered, from_states, bucket_bytes, cluster))
    if not groups:
        return lowered
    held, replaced, at = dict(lowered.held), set[str](), defaultdict[str, list[Item]](list)
    users = _users(lowered.items)
    place = {item.name: number for number, item in enumerate(lowered.items)}
    for number, members in enumerate(groups):
        first = min(members, key=lambda item: place[item.name])
        for_use = _is_for_use(graph, first)
        block = block_of(first.inputs[0])
        name = f"{block}.bucket_{number}" if for_use else f"bucket.{number}"
        while {name, f"{name}.packed"} & held.keys():
            name += "'"
        made = _bucket_items(name, members, held, users, is_apart=for_use)
        makers = (from_states[key] for item in members for key in item.inputs if key in from_states)
        moved = [
            item
            for item in makers
            if place[item.name] > place[first.name] and item.name not in replaced
        ]
        at[first.name].extend((*moved, *made))
        replaced.update(item.name for item in (*members, *moved))
    items = [
        part
        for item in lowered.items
        for part in (*at[item.name], *(() if item.name in replaced else (item,)))
    ]
    return Lowered(
        items=with_levels(graph, items),
        held=held,
        results=lowered.results,
        new_states=lowered.new_states,
    )


# Which items go together.


def _groups(
    graph: LogicalGraph,
    lowered: Lowered,
    from_states: Mapping[str, Item],
    bucket_bytes: int | None,
    cluster: Cluster | None,
) -> Iterator[list[Item]]:
    """Yield the members of each bucket, in the order in which their inputs are made.

    What gathers parameters for their use comes in the order of its use.
    """
    place = {item.name: number for number, item in enumerate(lowered.items)}
    maker = {key: number for number, item in enumerate(lowered.items) for key in item.outputs}
    maker |= dict.fromkeys(from_states, -1)
    alike: dict[tuple[object, ...], list[Item]] = defaultdict(list)
    runs = _runs(graph, lowered.items)
    for item in lowered.items:
        company = _company(graph, lowered, item, runs)
        if company is not None:
            alike[company].append(item)
    for members in alike.values():
        members.sort(key=lambda item: maker.get(item.inputs[0], -1))
        limit = bucket_bytes
        if limit is None:
            assert members[0].step is not None
            limit = _priced_bytes(members[0].step, cluster)
        open_ones: list[Item] = []
        size = 0
        first_use = len(place)
        for item in members:
            own = _buffer_bytes(item)
            if own > limit:
                continue
            use = min(first_use, place[item.name])
            # A bucket stands where the first of its values is used; all are made before.
            is_early = all(maker.get(i.inputs[0], -1) < use for i in (*open_ones, item))
            if open_ones and (size + own > limit or not is_early):
                if len(open_ones) > 1:
                    yield open_ones
                open_ones, size, use = [], 0, place[item.name]
            open_ones.append(item)
            size, first_use = size + own, use
        if len(open_ones) > 1:
            yield open_ones


def _company(
    graph: LogicalGraph, lowered: Lowered, item: Item, runs: Mapping[str, int]
) -> tuple[object, ...] | None:
    """Return what the items of a bucket have in common; None if an item goes alone."""
    step = item.step
    if item.kind is not ItemKind.COLLECTIVE or step is None or uniform_bytes(step) is None:
        return None
    if step.kind not in (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER):
        return None
    if _num_rows(step) < 2 or not prod(step.shape) or _split_dim(step) is None:
        return None
    reason = _reason(graph, lowered, item, runs)
    if not reason:
        return None
    mesh, sbp = step.source
    reduction = next((sbp[axis] for axis in step.axes if isinstance(sbp[axis], Partial)), None)
    when = (item.stage, item.phase, item.rate)
    return (step.kind, step.dtype, mesh, step.axes, reduction, *when, *reason)


def _reason(
    graph: LogicalGraph, lowered: Lowered, item: Item, runs: Mapping[str, int]
) -> tuple[object, ...]:
    """Return why an item may travel with others, and with which; empty if it may not."""
    assert item.step is not None
    if item.step.kind is StepKind.ALL_GATHER:
        if item.name in runs:
            return "a parameter for its use", runs[item.name]
        is_new_value = not item.asked_by and item.phase is Phase.OPTIMIZER
        return ("the new value of a state",) if is_new_value else ()
    asking = graph.by_name.get(item.asked_by)
    if asking is None:
        return ()
    if asking.phase is not Phase.OPTIMIZER:
        return "an argument", item.asked_by
    producer = graph.producers.get(lowered.held[item.outputs[0]].value)
    is_gradient = producer is not None and producer.phase is Phase.BACKWARD
    return ("a gradient",) if is_gradient else ()


def _is_for_use(graph: LogicalGraph, item: Item) -> bool:
    """Whether an item gathers a parameter for the forward or backward phase."""
    return (
        item.kind is ItemKind.COLLECTIVE
        and item.phase is not Phase.OPTIMIZER
        and is_gathered_on_use(graph, item.inputs[0])
    )


def _runs(graph: LogicalGraph, items: Iterable[Item]) -> dict[str, int]:
    """Return the run of each gather of a parameter for its use: those of one block in a row.

    Only what is used together travels together, so that no rank holds the whole of a model.
    """
    found: dict[str, int] = {}
    latest: dict[tuple[object, ...], tuple[str, int]] = {}
    for number, item in enumerate(items):
        if _is_for_use(graph, item):
            when, block = (item.stage, item.phase, item.rate), block_of(item.inputs[0])
            if latest.get(when, ("", 0))[0] != block:
                latest[when] = block, number
            found[item.name] = latest[when][1]
    return found


def _from_states(graph: LogicalGraph, items: Iterable[Item]) -> dict[str, Item]:
    """Return what makes keys of parameters alone, by key: it may go before all that use it."""
    inputs = {entry.name for entry in graph.inputs}
    return {
        key: item
        for item in items
        if item.kind is ItemKind.OP and inputs.issuperset(item.inputs)
        for key in item.outputs
        if is_gathered_on_use(graph, key)
    }


def _users(items: Iterable[Item]) -> dict[str, list[Item]]:
    users: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        for key in item.inputs:
            users[key].append(item)
    return users


def _priced_bytes(step: Step, cluster: Cluster | None) -> int:
    """Return the least bytes of a buffer of which latency takes only a small part of the time."""
    if cluster is None:
        return _ROUGH_BUCKET_BYTES
    unit, mesh = itemsize(step.dtype), step.source[0]

    def time_s(size_bytes: int) -> float:
        flat = _flat_step(step.kind, mesh, step.axes, step.dtype, size_bytes // unit)
        return step_time_s(flat, cluster)

    per_byte_s = time_s(_LARGEST) / _LARGEST
    size = _SMALLEST
    while size < _LARGEST and time_s(size) * (1 - _LATENCY_SHARE) > size * per_byte_s:
        size *= 2
    return size


# The items of a bucket.


def _bucket_items(
    name: str,
    members: Sequence[Item],
    held: dict[str, Held],
    users: dict[str, list[Item]],
    *,
    is_apart: bool,
) -> tuple[Item, Item, Item]:
    steps = tuple(item.step for item in members if item.step is not None)
    first, like = members[0], steps[0]
    num_elements = sum(_buffer_elements(step) for step in steps)
    flat = _flat_step(
        like.kind, like.source[0], like.axes, like.dtype, num_elements, like.source[1]
    )
    before, after = f"{name}.packed", name
    kind = TensorType(flat.shape, flat.dtype)
    held[before] = Held("", first.stage, flat.source[1], kind)
    held[after] = Held("", first.stage, flat.target[1], kind)
    outputs = tuple(item.outputs[0] for item in members)
    using = [user for key in outputs for user in users.get(key, ())]
    # Views that only the optimizer takes are made in its own segments.
    is_late = bool(using) and all(
        user.phase is Phase.OPTIMIZER and user.rate is Rate.STEP for user in using
    )
    pack = replace(
        first, name=before, kind=ItemKind.PACK, inputs=tuple(item.inputs[0] for item in members),
        outputs=(before,), step=None, packed=steps, is_apart=is_apart,
    )  # fmt: skip
    travel = replace(first, name=after, inputs=(before,), outputs=(after,), step=flat)
    unpack = replace(
        first, name=f"{name}.unpacked", kind=ItemKind.UNPACK, inputs=(after,), outputs=outputs,
        step=None, packed=steps, phase=Phase.OPTIMIZER if is_late else first.phase,
        rate=Rate.STEP if is_late else first.rate,
    )  # fmt: skip
    return pack, travel, unpack


def _flat_step(
    kind: StepKind,
    mesh: Placement,
    axes: tuple[int, ...],
    dtype: str,
    num_elements: int,
    like: NdSbp | None = None,
) -> Step:
    """Return the step of a flat buffer.

    Its last dim holds the elements; each other mesh axis has a dim of its own that it splits, as
    ranks along it hold other values.

    Args:
        kind: As of the steps that it replaces; so are mesh, axes and dtype.
        mesh: Of the stage.
        axes: Whose ranks take part.
        dtype: Of the elements.
        num_elements: Of the larger of what a rank has before and after.
        like: The nd-SBP of one of them before, which says what is reduced; sums if None.
    """
    others = _others(mesh, axes)
    shape = (*(mesh.mesh_shape[axis] for axis in others), num_elements)
    whole: list[Sbp] = [B] * mesh.num_axes
    for dim, axis in enumerate(others):
        whole[axis] = S(dim)
    partial, split = list(whole), list(whole)
    for axis in axes:
        partial[axis] = like[axis] if like is not None else Partial()
        split[axis] = S(len(others))
    before = split if kind is StepKind.ALL_GATHER else partial
    after = split if kind is StepKind.REDUCE_SCATTER else whole
    step = Step(
        kind=kind,
        shape=shape,
        dtype=dtype,
        source=(mesh, NdSbp(*before)),
        target=(mesh, NdSbp(*after)),
        axes=axes,
        size_bytes=0,
    )
    return replace(step, size_bytes=collective_bytes(step))


def _others(mesh: Placement, axes: tuple[int, ...]) -> list[int]:
    """Return the mesh axes that a flat buffer has a dim for, before that of its elements."""
    return [a for a, extent in enumerate(mesh.mesh_shape) if a not in axes and extent > 1]


def _num_rows(step: Step) -> int:
    """Return the number of ranks in a group of a step."""
    return prod(step.source[0].mesh_shape[axis] for axis in step.axes)


def _shapes(step: Step) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what every rank has before and after: steps that move alike on all ranks only."""
    first = (0,) * step.source[0].num_axes
    before, after = (
        local_shape(step.shape, sbp, mesh.mesh_shape, first)
        for mesh, sbp in (step.source, step.target)
    )
    return before, after


def _buffer_elements(step: Step) -> int:
    return max(map(prod, _shapes(step)))


def _buffer_bytes(item: Item) -> int:
    assert item.step is not None
    return _buffer_elements(item.step) * itemsize(item.step.dtype)


def _split_dim(step: Step) -> int | None:
    """Return the dim that a reduce-scatter cuts or an all-gather joins, 0 for an all-reduce.

    None if it is not one dim, in as many equal parts as there are ranks, in their order.
    """
    if step.kind is StepKind.ALL_REDUCE:
        return 0
    small, large = step.target, step.source
    if step.kind is StepKind.ALL_GATHER:
        small, large = large, small
    dims = [d for d in range(len(step.shape)) if len({*_extents(step, d)}) > 1]
    if len(dims) != 1:
        return None
    (dim,) = dims
    parts, wholes = bounds_of(step.shape, *small), bounds_of(step.shape, *large)
    for group in step.source[0].groups(*step.axes):
        start, stop = wholes[group[0]][dim]
        each = (stop - start) // len(group)
        wanted = [(start + i * each, start + (i + 1) * each) for i in range(len(group))]
        if [parts[rank][dim] for rank in group] != wanted:
            return None
    return dim


def _extents(step: Step, dim: int) -> tuple[int, int]:
    before, after = _shapes(step)
    return before[dim], after[dim]


# What ranks execute.


def pack_instructions(item: Item) -> Iterator[Instruction]:
    """Yield how values are laid out in a flat buffer; the same on every rank."""
    (flat,) = item.outputs
    scatters = item.packed[0].kind is StepKind.REDUCE_SCATTER
    parts = []
    for index, (key, step) in enumerate(zip(item.inputs, item.packed, strict=True)):
        before, _ = _shapes(step)
        value = key
        if scatters:
            dim, rows = _split_dim(step), _num_rows(step)
            assert dim is not None, "only such steps are packed"
            value = f"{flat}.{index}.rows"
            yield from _rows_first(item.name, key, value, before, dim, rows)
        parts.append(f"{flat}.{index}")
        row = (_num_rows(step), -1) if scatters else (-1,)
        yield _call(item.name, RESHAPE, (Ref(value), row), parts[-1])
    joined = f"{flat}.joined"
    yield _call(item.name, CAT, (tuple(map(Ref, parts)), 1 if scatters else 0), joined)
    others = _others(item.packed[0].source[0], item.packed[0].axes)
    shape = (*(1 for _ in others), -1)
    yield _call(item.name, RESHAPE, (Ref(joined), shape), flat)


def _rows_first(
    node: str, key: str, made: str, shape: tuple[int, ...], dim: int, rows: int
) -> Iterator[Instruction]:
    """Yield how one dim is cut into rows, which come first: (a, rows b, c) -> (rows, a, b, c)."""
    cut = (*shape[:dim], rows, shape[dim] // rows, *shape[dim + 1 :])
    order = (dim, *range(dim), *range(dim + 1, len(cut)))
    yield _call(node, RESHAPE, (Ref(key), cut), f"{made}.cut")
    yield _call(node, PERMUTE, (Ref(f"{made}.cut"), order), made)


def unpack_instructions(item: Item) -> Iterator[Instruction]:
    """Yield how values are taken out of a flat buffer; the same on every rank."""
    (flat,) = item.inputs
    gathers = item.packed[0].kind is StepKind.ALL_GATHER
    rows = _num_rows(item.packed[0])
    shapes = [_shapes(step) for step in item.packed]
    sizes = tuple(prod(before if gathers else after) for before, after in shapes)
    table = f"{item.name}.table"
    yield _call(item.name, VIEW, (Ref(flat), (rows, -1) if gathers else (-1,)), table)
    parts = tuple(f"{item.name}.{index}" for index in range(len(sizes)))
    yield Instruction(
        op=SPLIT_WITH_SIZES,
        args=(Ref(table), sizes, 1 if gathers else 0),
        outputs=parts,
        node=item.name,
    )
    for part, key, step, (before, after) in zip(
        parts, item.outputs, item.packed, shapes, strict=True
    ):
        if not gathers:
            yield _call(item.name, VIEW, (Ref(part), after), key)
            continue
        dim = _split_dim(step)
        assert dim is not None, "only such steps are packed"
        cut = (rows, *before)
        order = (*range(1, dim + 1), 0, *range(dim + 1, len(cut)))
        yield _call(item.name, VIEW, (Ref(part), cut), f"{part}.rows")
        yield _call(item.name, PERMUTE, (Ref(f"{part}.rows"), order), f"{part}.back")
        # A copy in any case: a view would keep the whole buffer alive.
        yield Instruction(
            op=CLONE,
            args=(Ref(f"{part}.back"),),
            kwargs={"memory_format": Symbol("memory_format", "contiguous_format")},
            outputs=(f"{part}.own",),
            node=item.name,
        )
        yield _call(item.name, VIEW, (Ref(f"{part}.own"), after), key)


def _call(node: str, op: str, args: tuple[object, ...], made: str) -> Instruction:
    return Instruction(op=op, args=args, outputs=(made,), node=node)
