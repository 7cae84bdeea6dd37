"""Lifetimes of storages: when each storage of each rank is made and freed, over one step of a plan.

The step is replayed (`sbp_core.interpreter`) like in a run, with counts of holders instead of
tensors:

* An instruction's results coexist with its arguments; a value dies after the last instruction that
  uses it, unless it leaves its segment. Views keep the storage that they look at.
* A register keeps the values of a firing until the last consumer has taken them; the consumer drops
  each value after its last use.
* A sent value is held until every receiver has it. A received part counts on the receiver alone,
  with its own bytes, whether or not a transport shares memory.
* Old states live to the end of the step, next to the new ones, because they remain valid if the
  step fails. New values that are copied over the old ones (`Actor.in_place`) die like any value.

Time is counted in ticks: one for each instruction or boxing step of a rank. The interleaving of
threads is one of the possible ones, in which every instruction takes equally long. In a run, the
time at which a receiver takes a message varies. So a rank that sends is replayed a second time, as
far ahead of all others as possible, and the larger memory counts. The result does not depend on
which ranks do the same, so one of them represents all.

Each rank is replayed by itself (`rank_events`). A segment whose arguments have the same memory
layout as before, such as in the next micro-batch, is not executed again (`ledger`).
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

#: The arguments of operators without tensors.
_NOTHING: Mapping[str, Value] = {}

#: A duration longer than all instructions of a step together.
_LONG = 1e12


def lifetimes(plan: PhysicalPlan, layouts: CallLayouts) -> dict[int, RankLifetimes]:
    """Return the lifetimes of all storages, by rank, in a step that follows another.

    Args:
        plan: A plan with firing orders that `sbp_core.check` accepts.
        layouts: Computes the memory layout of results.

    Raises:
        PlanError: the orders deadlock, or the layout of a result is not known.
    """
    return of_each_rank(each_lifetimes(plan, layouts))


def of_each_rank(each: Iterable[tuple[RankLifetimes, Sequence[int]]]) -> dict[int, RankLifetimes]:
    """Return lifetimes by rank, given lifetimes with all ranks that they hold for."""
    found = {rank: replace(one, rank=rank) for one, ranks in each for rank in ranks}
    return dict(sorted(found.items()))


def each_lifetimes(
    plan: PhysicalPlan, layouts: CallLayouts
) -> Iterator[tuple[RankLifetimes, tuple[int, ...]]]:
    """Yield lifetimes and the ranks that have them, once for each set of equal ranks.

    See `lifetimes`. The lifetimes of a large plan take much memory, so add them up one by one.
    """
    yield from replayed(plan, layouts, fold(plan), _marks(plan, layouts))


def replayed(
    plan: PhysicalPlan, layouts: CallLayouts, folded: FoldedPlan, marks: Mapping[int, Hashable]
) -> Iterator[tuple[RankLifetimes, tuple[int, ...]]]:
    """Yield lifetimes of one rank for all ranks of a class with equal marks, and these ranks.

    Ranks of a class fire alike, so the order of all firings is found for the folded plan (one rank
    for each class). Ranks of a class may hold different parts; each mark is replayed separately.

    Args:
        plan: The plan, see `lifetimes`.
        layouts: Computes the memory layout of results.
        folded: The folded plan.
        marks: By rank, a mark; ranks of a class with equal marks have the same memory layouts.
    """
    order = _order(folded)
    events = events_by_rank(folded.plan, order)
    senders = {channel.sender[0] for channel in folded.plan.links}
    # The other ranks of its class would be ahead with it.
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
            # A rank holds a sent value longest if it is ahead of all others. A rank of one thread
            # then does the same in the same order, and holds no less at any moment.
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
    """Return the firing order of a plan whose classes are parts of the classes of another plan.

    Ranks of a class fire in step, so the parts of a class do so too, one after the other.

    Args:
        order: The firing order of the other plan.
        folded: The other plan.
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
    """Return the lifetimes of a rank for the order of its events that needs most memory."""
    first = replay.run(orders[0], {})
    # New states may have another layout than the first ones, such as column by column.
    moved = first.moved_states()
    found = replay.run(orders[0], moved).found() if moved else first.found()
    more = (replay.run(events, moved).found() for events in orders[1:])
    return max((found, *more), key=peak_bytes)


def _late_stores(folded: FoldedPlan) -> Mapping[int, Events]:
    """Return the events of ranks that offload, with the slowest possible copies to the host.

    The timing decides whether the previous or the next group is on the device; the larger counts.
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
        folded: The folded plan.
        duration: The time of a firing on its thread; if None, all instructions take equally long.

    Raises:
        PlanError: there is none.
    """
    order = firing_order(folded.plan, folded.stands_for, duration or ticks(folded.plan))
    if order is None:
        raise PlanError("the firing orders deadlock", todo="check the plan first")
    return order


def _marks(plan: PhysicalPlan, layouts: CallLayouts) -> dict[int, Hashable]:
    """Return a mark for each rank; ranks of a class with equal marks have the same memory layouts.

    A mark holds the shapes of the shards, and the piece of them that a boxing step leaves in place.
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
    """Return the non-tensor arguments of a rank's operators on which memory layouts may depend.

    For operators without any tensor arguments, such as `arange`, it holds the layouts themselves.
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
    """Whether a rank acts differently if it alone is ahead, and the rest of its class is not.

    If it sends them something, it holds that for longer. If it has several threads, another thread
    continues while the first one waits for the class, such as in a collective.
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
    # Prefix sums of the bytes that begin at a tick, less those that ended at the tick before:
    #
    #     ticks         0   1   2   3      a: 8 bytes, ticks 0 to 1; b: 4 bytes, ticks 1 to 2
    #     change       +8  +4  -8  -4
    #     alive         8  12   4   0
    change = [0] * (num_ticks + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.size_bytes
        change[buffer.end + 1] -= buffer.size_bytes
    return list(accumulate(change[:num_ticks]))
