"""When each storage of each rank is made and dropped, over one step of a plan.

The step is replayed (`sbp_core.interpreter`), as runtimes do it, with counts of holders instead of
tensors:

* An instruction's results coexist with its arguments; a value dies after the instruction that uses
  it last, unless it leaves its segment. Views keep the storage that they look at.
* A filling of a register holds its values until the last consumer has taken it; who took it drops
  each value after its last use.
* What was sent is held until every receiver has it. A received part counts on the receiver alone,
  with the bytes that it shows, whether or not a transport shares memory.
* Old states live to the end of the step, next to the new ones: a step that fails leaves them. New
  values that are copied over the old ones (`Actor.in_place`) die like any other value.

Time is counted in ticks: one for each instruction or boxing step of a rank. Between threads it is
one of the possible interleavings, in which every instruction takes equally long. When a receiver
takes what was sent is a matter of time in a run, so a rank that sends is replayed once more, as far
ahead of all others as can be; what needs more memory counts. Nothing of this depends on which ranks
are alike, so that one of them tells of all.

Each rank is replayed by itself (`rank_events`), and a segment whose arguments lie as they did
before, such as that of the next micro-batch, is not executed again (`ledger`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from sbp_core.boxing.step import StepKind
from sbp_core.compile.actors import ActorId, Compute, keys_in
from sbp_core.compile.offload import FETCH_THREAD, STORE_THREAD
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.compile.symmetry import FoldedPlan, fold, shard_shapes
from sbp_core.compile.token_game import TokenGame
from sbp_core.errors import PlanError
from sbp_core.interpreter.firings import Group, firing_order, ticks
from sbp_core.memory.ledger import Buffer
from sbp_core.memory.rank_events import Events, events_ahead, events_by_rank
from sbp_core.memory.storage_view import CallLayouts, Value
from sbp_core.memory.storages import RankLifetimes, RankReplay, own_piece
from sbp_core.signatures.views import traits_of

#: What operators read that are given no tensor.
_NOTHING: Mapping[str, Value] = {}

#: Longer than all instructions of a step take together.
_LONG = 1e12


def lifetimes(plan: PhysicalPlan, layouts: CallLayouts) -> dict[int, RankLifetimes]:
    """Return the lifetimes of all storages, by rank, in a step that follows another.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        layouts: Says how results lie.

    Raises:
        PlanError: the orders deadlock, or the layout of a result is not known.
    """
    return of_each_rank(each_lifetimes(plan, layouts))


def of_each_rank(each: Iterable[tuple[RankLifetimes, Sequence[int]]]) -> dict[int, RankLifetimes]:
    """Return the lifetimes of all ranks, of those of one rank for all that are like it."""
    found = {rank: replace(one, rank=rank) for one, ranks in each for rank in ranks}
    return dict(sorted(found.items()))


def each_lifetimes(
    plan: PhysicalPlan, layouts: CallLayouts
) -> Iterator[tuple[RankLifetimes, tuple[int, ...]]]:
    """Yield the lifetimes of one rank of those that are alike, and these ranks.

    See `lifetimes`. Those of a large plan take much memory, so whoever adds them up takes one after
    the other.
    """
    yield from replayed(plan, layouts, fold(plan), _marks(plan, layouts))


def replayed(
    plan: PhysicalPlan, layouts: CallLayouts, folded: FoldedPlan, marks: Mapping[int, Hashable]
) -> Iterator[tuple[RankLifetimes, tuple[int, ...]]]:
    """Yield lifetimes of one rank for all of a class whose marks are equal, and these ranks.

    Ranks of a class fire alike, so that the order in which all fire is found for the folded plan.
    Of these, some may hold other parts than others; each of them is replayed by itself.

    Args:
        plan: See `lifetimes`.
        layouts: Likewise.
        folded: The plan, folded.
        marks: By rank, what must be equal for the values of ranks of a class to lie alike.
    """
    order = _order(folded)
    events = events_by_rank(folded.plan, order)
    senders = {channel.sender[0] for channel in folded.plan.links}
    # Its like would go ahead with it.
    apart = {rank for rank in senders if _needs_its_like(plan, folded, rank)}
    together = dict(events_ahead(folded, order, sorted(senders - apart)))
    late = _late_stores(folded)
    for first, members in folded.members.items():
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for member in members:
            alike[marks[member]].append(member)
        for rank, *others in alike.values():
            orders = [events[first]]
            replays = [(RankReplay(folded.plan, first, plan.by_rank[rank], layouts), orders)]
            # How long a rank holds what it sent is a matter of time: longest if it is ahead of all
            # others. A rank of one thread does the same in the same order then, and holds no less
            # at any moment.
            if first in senders and len(plan.by_rank[rank].orders) == 1:
                orders.clear()
            if first in late:
                orders.append(late[first])
            if first in together:
                orders.append(together[first])
            if first in apart:
                alone = fold(plan, {other: other == rank for other in marks})
                ((_, ahead),) = events_ahead(alone, _refined(order, folded, alone), [rank])
                by_itself = RankReplay(alone.plan, rank, plan.by_rank[rank], layouts)
                replays.append((by_itself, [ahead]))
            found = (_longest(one, orders) for one, orders in replays if orders)
            yield max(found, key=peak_bytes), (rank, *others)


def _refined(order: Iterable[Group], folded: FoldedPlan, finer: FoldedPlan) -> list[Group]:
    """Return an order in which a plan may fire whose classes are parts of those of another one.

    Ranks of a class fire in step, so that its parts do, one after the other.

    Args:
        order: In which the other one fires.
        folded: The other one.
        finer: The plan of the parts.
    """
    game = TokenGame(finer.plan, finer.stands_for)
    parts: dict[int, list[int]] = defaultdict(list)
    for rank in finer.members:
        parts[folded.stands_for[rank]].append(rank)
    known: dict[Group, list[Group]] = {}
    found: list[Group] = []
    for group in order:
        if group not in known:
            actors = ((part, name) for rank, name in group for part in parts[rank])
            known[group] = list(dict.fromkeys(map(game.partners, actors)))
        found += known[group]
    return found


def _longest(replay: RankReplay, orders: Sequence[Events]) -> RankLifetimes:
    """Return the lifetimes of a rank in the order of its events in which it needs most memory."""
    first = replay.run(orders[0], {})
    # New states may lie otherwise than the first ones, such as column by column.
    moved = first.moved_states()
    found = replay.run(orders[0], moved).found() if moved else first.found()
    more = (replay.run(events, moved).found() for events in orders[1:])
    return max((found, *more), key=peak_bytes)


def _late_stores(folded: FoldedPlan) -> Mapping[int, Events]:
    """Return the events of ranks that offload, with the copies to the host as slow as can be.

    Whether the group before or the one after is on the device during an update is a matter of
    time: what needs more memory counts.
    """
    ranks = [p.rank for p in folded.plan.ranks if any(slot.offloaded for slot in p.slots)]
    if not ranks:
        return {}
    usual = ticks(folded.plan)

    def duration(actor_id: ActorId) -> float:
        thread = folded.plan.by_rank[actor_id[0]].by_name[actor_id[1]].thread
        if thread == FETCH_THREAD:
            return 0.0
        return _LONG if thread == STORE_THREAD else usual(actor_id)

    events = events_by_rank(folded.plan, _order(folded, duration))
    return {rank: events[rank] for rank in ranks}


def _order(folded: FoldedPlan, duration: Callable[[ActorId], float] | None = None) -> list[Group]:
    """Return the order in which ranks fire.

    Args:
        folded: The plan.
        duration: How long a firing keeps its thread busy; if None, every instruction takes equally
            long.

    Raises:
        PlanError: there is none.
    """
    order = firing_order(folded.plan, folded.stands_for, duration or ticks(folded.plan))
    if order is None:
        raise PlanError("the firing orders deadlock", todo="check the plan first")
    return order


def _marks(plan: PhysicalPlan, layouts: CallLayouts) -> dict[int, Hashable]:
    """Return what ranks have in common whose values lie alike, by rank.

    The shapes of their shards, and which piece of them a boxing step leaves where it is.
    """
    steps = list(dict.fromkeys(plan.steps))  # layers repeat
    shapes = shard_shapes(steps)
    kept: dict[int, list[Hashable]] = defaultdict(list)
    for number, step in enumerate(steps):
        if step.kind in (StepKind.ALL_REDUCE, StepKind.LOCAL):
            continue
        for rank in {*step.source[0].rank_list, *step.target[0].rank_list}:
            piece = own_piece(step, rank)
            if piece is not None:
                kept[rank].append((number, piece))
    numbers: dict[int, Hashable] = {}  # by the actors, which many ranks share
    for part in plan.ranks:
        if id(part.actors) not in numbers:
            numbers[id(part.actors)] = _numbers(part, layouts)
    return {
        part.rank: (shapes.get(part.rank), tuple(kept[part.rank]), numbers[id(part.actors)])
        for part in plan.ranks
    }


def _numbers(part: RankPlan, layouts: CallLayouts) -> Hashable:
    """Return what a rank's operators are given besides tensors, where layouts may depend on it.

    Of one that is given nothing else, such as `arange`, the layouts themselves are known.
    """
    return tuple(
        (entry.args, tuple(entry.kwargs.items()))
        if keys_in(entry)
        else layouts.call(entry, part.rank, _NOTHING.__getitem__)
        for actor in part.actors
        if isinstance(actor, Compute)
        for entry in actor.instructions
        if entry.op.split(".")[1] not in traits_of(entry.op).elementwise
    )


def _needs_its_like(plan: PhysicalPlan, folded: FoldedPlan, rank: int) -> bool:
    """Whether a rank that is ahead of its like does not do what it does in step with them.

    One that sends them something holds it for longer. One of several threads goes on with another
    one of them, where the first waits for its like, such as in a collective.
    """
    if len(folded.members[rank]) == 1:
        return False
    return len(plan.by_rank[rank].orders) > 1 or any(
        folded.stands_for[link.sender[0]] == rank == folded.stands_for[link.receiver[0]]
        and link.sender[0] != link.receiver[0]
        for link in plan.links
    )


def peak_bytes(found: RankLifetimes) -> int:
    """Return the most bytes alive at once."""
    return max(alive_bytes(found.buffers, len(found.ticks)))


def alive_bytes(buffers: Iterable[Buffer], num_ticks: int) -> list[int]:
    """Return the bytes alive at each tick."""
    # Prefix sums of what begins at a tick, less what ended at the one before:
    #
    #     ticks         0   1   2   3      a: 8 bytes, ticks 0 to 1; b: 4 bytes, ticks 1 to 2
    #     change       +8  +4  -8  -4
    #     alive         8  12   4   0
    change = [0] * (num_ticks + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.size_bytes
        change[buffer.end + 1] -= buffer.size_bytes
    return list(accumulate(change[:num_ticks]))
