"""Merge the collectives of small tensors into one collective of a flat buffer, a bucket.

The compiler does this after it has inserted boxing (changes of layout) between operators.

before: g1@(B) = all-reduce(g1)                      two calls, two latencies
        g2@(B) = all-reduce(g2)
after:  flat = pack(g1, g2)                          one copy of each
        sums = all-reduce(flat)
        g1@(B), g2@(B) = unpack(sums)                views

Also reduce-scatters of gradients, reductions of several arguments of one node, and all-gathers: of
new parameter values whose updates are sharded, and of the parameters of one block that are gathered
for their use. `packing` defines their layout in the buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sbp_core.boxing import StepKind
from sbp_core.boxing.slices import itemsize
from sbp_core.cluster import Cluster
from sbp_core.compile.bucket_price import most_bucket_bytes, packed_part
from sbp_core.compile.items import Item, ItemKind, KeyLayout, LoweredItems
from sbp_core.compile.levels import is_awaited, is_gathered_on_use, with_levels
from sbp_core.compile.packing import PackedLayout, PackedPart, flat_step
from sbp_core.graph.ir import LogicalGraph, Phase, Rate, TensorType, block_of
from sbp_core.sbp import Partial

#: An item that may travel in a bucket, and its layout there.
_Member = tuple[Item, PackedPart]


def bucket(
    graph: LogicalGraph,
    lowered: LoweredItems,
    bucket_bytes: int | None,
    cluster: Cluster | None = None,
) -> LoweredItems:
    """Return the items with buckets; the bytes moved stay the same.

    Args:
        graph: The graph that was lowered.
        lowered: The items, without buckets.
        bucket_bytes: Most bytes of a buffer on a rank; 0 for no buckets, None for as many as the
            price of the step suggests: more would save less than a tenth of its time.
        cluster: The machine whose prices count; rough prices without.
    """
    if bucket_bytes == 0:
        return lowered
    inputs = {entry.name for entry in graph.inputs}
    # Items that make keys of parameters alone, by key: they may go before all users.
    from_states = {
        key: item
        for item in lowered.items
        if item.kind is ItemKind.OP and inputs.issuperset(item.inputs)
        for key in item.outputs
        if is_gathered_on_use(graph, key)
    }
    groups = list(_groups(graph, lowered, from_states, bucket_bytes, cluster))
    if not groups:
        return lowered
    # A bucket takes the place of its first member. No item before that uses a result of any member,
    # and `_groups` makes sure that all their inputs are there.
    #
    #     g1  g2  all-reduce(g1)  update(g1)  all-reduce(g2)  update(g2)
    #     g1  g2  pack  all-reduce  unpack  update(g1)  update(g2)
    held, replaced, at = dict(lowered.held), set[str](), defaultdict[str, list[Item]](list)
    users: dict[str, list[Item]] = defaultdict(list)
    for item in lowered.items:
        for key in item.inputs:
            users[key].append(item)
    place = {item.name: number for number, item in enumerate(lowered.items)}
    for number, bucketed in enumerate(groups):
        members = [item for item, _ in bucketed]
        first = min(members, key=lambda item: place[item.name])
        for_use = _is_for_use(graph, first)
        block = block_of(first.inputs[0])
        name = f"{block}.bucket_{number}" if for_use else f"bucket.{number}"
        # A value of the graph may already have this name.
        while {name, f"{name}.packed"} & held.keys():
            name += "'"
        made = _bucket_items(name, bucketed, held, users, is_apart=for_use)
        # The cast of a shard, say, stands where its own gather was, which may be after the bucket.
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
    return replace(lowered, items=with_levels(graph, items), held=held)


# Which items go together.


def _groups(
    graph: LogicalGraph,
    lowered: LoweredItems,
    from_states: Mapping[str, Item],
    bucket_bytes: int | None,
    cluster: Cluster | None,
) -> Iterator[list[_Member]]:
    """Yield the members of each bucket, in the order in which their inputs are made.

    Gathers of parameters come in the order in which the parameters are used.
    """
    place = {item.name: number for number, item in enumerate(lowered.items)}
    maker = {key: number for number, item in enumerate(lowered.items) for key in item.outputs}
    # Items that depend on parameters alone can move before any bucket, as if they were first.
    maker |= dict.fromkeys(from_states, -1)
    alike: dict[tuple[object, ...], list[_Member]] = defaultdict(list)
    runs = _runs(graph, lowered.items)
    for item in lowered.items:
        step = item.step if item.kind is ItemKind.COLLECTIVE else None
        part = None if step is None else packed_part(step)
        key = None if part is None else _bucket_key(graph, lowered, item, runs)
        if part is not None and key is not None:
            alike[key].append((item, part))
    limits: dict[object, int] = {}
    for members in alike.values():
        # Neighbours in the backward phase share a bucket, so that it is sent when they are made and
        # does not wait for a gradient from the other end of the model.
        members.sort(key=lambda member: maker.get(member[0].inputs[0], -1))
        like = members[0][0].step
        assert like is not None, "only boxing travels in buckets"
        what = like.kind, like.source[0], like.axes, like.dtype
        if what not in limits:
            limits[what] = (
                most_bucket_bytes(like, cluster) if bucket_bytes is None else bucket_bytes
            )
        limit = limits[what]
        open_ones: list[_Member] = []
        size = 0
        first_use = len(place)
        for item, part in members:
            own = part.num_elements * itemsize(like.dtype)
            # It travels alone: latency is already a small part of its time.
            if own > limit:
                continue
            use = min(first_use, place[item.name])
            # A bucket stands where the first of its values is used; all are made before.
            waiting = (item, *(member for member, _ in open_ones))
            is_early = all(maker.get(i.inputs[0], -1) < use for i in waiting)
            if open_ones and (size + own > limit or not is_early):
                if len(open_ones) > 1:
                    yield open_ones
                open_ones, size, use = [], 0, place[item.name]
            open_ones.append((item, part))
            size, first_use = size + own, use
        if len(open_ones) > 1:
            yield open_ones


def _bucket_key(
    graph: LogicalGraph, lowered: LoweredItems, item: Item, runs: Mapping[str, int]
) -> tuple[object, ...] | None:
    """Return a key that the items of a bucket share; None if an item travels alone."""
    step = item.step
    assert step is not None, "only boxing travels in buckets"
    # Why it may travel with other items, and with which.
    reason: tuple[object, ...] = ()
    if step.kind is StepKind.ALL_GATHER:
        if item.name in runs:
            reason = "a parameter for its use", runs[item.name]
        elif not item.asked_by and item.phase is Phase.OPTIMIZER:
            reason = ("the new value of a state",)
    elif item.asked_by and is_awaited(graph, item):
        # The node waits for all of its arguments anyway.
        reason = "an argument", item.asked_by
    elif item.asked_by:
        producer = graph.producers.get(lowered.held[item.outputs[0]].value)
        is_gradient = producer is not None and producer.phase is Phase.BACKWARD
        reason = ("a gradient",) if is_gradient else ()
    if not reason:
        return None
    mesh, sbp = step.source
    reduction = next((sbp[axis] for axis in step.axes if isinstance(sbp[axis], Partial)), None)
    # One call has one kind, dtype, group and reduction, and one actor makes it, at one time.
    when = (item.stage, item.phase, item.rate)
    return (step.kind, step.dtype, mesh, step.axes, reduction, *when, *reason)


def _is_for_use(graph: LogicalGraph, item: Item) -> bool:
    """Whether an item gathers a parameter for the forward or backward phase."""
    return (
        item.kind is ItemKind.COLLECTIVE
        and item.phase is not Phase.OPTIMIZER
        and is_gathered_on_use(graph, item.inputs[0])
    )


def _runs(graph: LogicalGraph, items: Iterable[Item]) -> dict[str, int]:
    """Return the run of each gather of a parameter: consecutive gathers of one block.

    Only parameters that are used together travel together, so that no rank holds the whole model.
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


# The items of a bucket.


def _bucket_items(
    name: str,
    members: Sequence[_Member],
    held: dict[str, KeyLayout],
    users: dict[str, list[Item]],
    *,
    is_apart: bool,
) -> tuple[Item, Item, Item]:
    items, parts = zip(*members, strict=True)
    first, like = items[0], items[0].step
    assert like is not None, "only boxing travels in buckets"
    layout = PackedLayout.of(like, parts)
    num_elements = sum(part.num_elements for part in parts)
    flat = flat_step(like.kind, like.source[0], like.axes, like.dtype, num_elements, like.source[1])
    before, after = f"{name}.packed", name
    kind = TensorType(flat.shape, flat.dtype)
    held[before] = KeyLayout("", first.stage, flat.source[1], kind)
    held[after] = KeyLayout("", first.stage, flat.target[1], kind)
    outputs = tuple(item.outputs[0] for item in items)
    using = [user for key in outputs for user in users.get(key, ())]
    # Views that only the optimizer takes are made in its own segments.
    rates = {user.rate if user.phase is Phase.OPTIMIZER else Rate.MICRO for user in using}
    is_late = len(rates) == 1 and Rate.MICRO not in rates
    pack = replace(
        first, name=before, kind=ItemKind.PACK, inputs=tuple(item.inputs[0] for item in items),
        outputs=(before,), step=None, packed=layout, is_apart=is_apart,
    )  # fmt: skip
    travel = replace(first, name=after, inputs=(before,), outputs=(after,), step=flat)
    unpack = replace(
        first, name=f"{name}.unpacked", kind=ItemKind.UNPACK, inputs=(after,), outputs=outputs,
        step=None, packed=layout, phase=Phase.OPTIMIZER if is_late else first.phase,
        rate=rates.pop() if is_late else first.rate,
    )  # fmt: skip
    return pack, travel, unpack
