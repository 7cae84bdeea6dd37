"""Fold a plan to one rank of each class of equal ranks, so that large plans are analysed fast.

    ranks   0 1 2 3 | 4 5 6 7        two stages, in each four ranks that split a batch
    folded  0       | 4              one of each; `stands_for` maps every rank to its representative

Two ranks are of one class if

    content     their slots, actors, registers and orders are equal, but for numbers (see `fold`)
    groups      for each of their collectives, the ranks of the groups have the same classes
    links       for each of their sends and receives, the other ends have the same classes

This is the coarsest equitable partition: it begins with ranks of equal content, and separates ranks
whose neighbours differ until no class has such ranks. It works for plans from any source.

Why one rank of a class stands for all: let the ranks of a class fire in step, each actor when the
folded plan fires it. Then before each firing the counts of firings are equal all over a class. What
a rank waits for (fillings of its own registers, messages and credits of some classes, a group of
some classes) is there for the whole class if it is there for one rank. So each firing order of the
folded plan is an order of the whole plan, with the same counts. In a marked graph, one order that
comes to its end proves that all do (Kahn). And if the folded plan stops, so does the whole one.

The folded plan does not show what ranks of one class know of each other: see `happens_before`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sbp_core.boxing.slices import Bounds, bounds_of, local_transition
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.compile.actors import ActorId, Collective
from sbp_core.compile.physical import Channel, PhysicalPlan
from sbp_core.sbp import Partial


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedPlan:
    """A plan of one rank of each class.

    Args:
        plan: The plan of the first rank of each class, with the boxing steps and stages of all.
        stands_for: For each rank, its representative.
        members: For each rank that represents a class, the ranks of the class, ascending.
    """

    plan: PhysicalPlan
    stands_for: Mapping[int, int]
    members: Mapping[int, tuple[int, ...]]

    def unfolded(self, firings: Sequence[ActorId]) -> Iterator[ActorId]:
        """Yield the firings of all ranks, in an order in which they may happen.

        Args:
            firings: Firings of the folded plan, in such an order; the firings of a collective after
                each other. The returned firings are also in this order, group by group.
        """
        awaited: set[int] = set()
        for rank, name in firings:
            actor = self.plan.by_rank[rank].by_name[name]
            if not isinstance(actor, Collective):
                yield from ((member, name) for member in self.members[rank])
                continue
            if not awaited:
                # The first firing of a collective brings all classes that fire together.
                group = self.plan.steps[actor.step].group
                awaited = {self.stands_for[other] for other in group(rank)}
                met: set[int] = set()
                for one in awaited:
                    for member in self.members[one]:
                        if member not in met:
                            met.update(group(member))
                            yield from ((other, name) for other in group(member))
            awaited.discard(rank)


def fold(
    plan: PhysicalPlan, marks: Mapping[int, Hashable] | None = None, *, numbers: bool = False
) -> FoldedPlan:
    """Return a plan folded to one rank of each class.

    Args:
        plan: A plan whose boxing actors have their partners.
        marks: By rank, further properties that must be equal for ranks of one class.
        numbers: Whether the numbers among operators' arguments must be equal. They say where the
            shard of a rank begins, such as its part of the classes, and do not affect the firings.
    """
    marks = marks or {}
    alike = plan.alike if numbers else plan.alike_but_for_numbers
    classes = _numbered((rank, (marks.get(rank), first)) for rank, first in alike.items())
    neighbours = _Neighbours(plan)
    num_classes = len(set(classes.values()))
    while num_classes < len(classes):
        met = neighbours.of(classes)
        classes = _numbered((rank, (number, *met[rank])) for rank, number in classes.items())
        before, num_classes = num_classes, len(set(classes.values()))
        if num_classes == before:
            break
    members: dict[int, list[int]] = defaultdict(list)
    for rank, number in sorted(classes.items()):
        members[number].append(rank)
    stands_for = {rank: ranks[0] for ranks in members.values() for rank in ranks}
    # One link for all links between the same actors of two classes, with the least quota.
    links: dict[tuple[ActorId, ActorId], Channel] = {}
    for link in plan.links:
        (sender, sends), (receiver, receives) = link.sender, link.receiver
        ends = (stands_for[sender], sends), (stands_for[receiver], receives)
        known = links.setdefault(ends, replace(link, sender=ends[0], receiver=ends[1]))
        if link.quota < known.quota:
            links[ends] = replace(known, quota=link.quota)
    return FoldedPlan(
        plan=replace(
            plan,
            ranks=tuple(part for part in plan.ranks if stands_for[part.rank] == part.rank),
            links=tuple(links.values()),
        ),
        stands_for=stands_for,
        members={ranks[0]: tuple(ranks) for ranks in members.values()},
    )


def shard_shapes(steps: Iterable[BoxingStep]) -> Mapping[int, Hashable]:
    """Return for each rank the shapes of its shards before and after all boxing steps.

    For a local step, also the shape of the slice that the rank has in both, and whether it is the
    rank that keeps its values as the one addend: these decide what it keeps, cuts or fills up.
    """
    found: dict[int, list[Hashable]] = defaultdict(list)
    for step in dict.fromkeys(steps):
        ends = [bounds_of(step.shape, *end) for end in (step.source, step.target)]
        for number, end in enumerate(ends):
            for rank, bounds in end.items():
                found[rank].append((number, _extents(bounds)))
        if step.kind is StepKind.LOCAL:
            (placement, _), (axis,) = step.source, step.axes
            for rank, at in placement.coordinates():
                keeps = isinstance(step.target[1][axis], Partial) and not at[axis]
                found[rank].append((keeps, _extents(local_transition(step, rank)[0])))
    return {rank: tuple(shapes) for rank, shapes in found.items()}


def _extents(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)


def _numbered(keys: Iterable[tuple[int, Hashable]]) -> dict[int, int]:
    """Return a number for each rank, the same for equal keys."""
    numbers: dict[Hashable, int] = {}
    return {rank: numbers.setdefault(key, len(numbers)) for rank, key in keys}


class _Neighbours:
    """The partners of each rank's actors on other ranks."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self._links: dict[int, list[tuple[bool, str, int, ActorId]]] = defaultdict(list)
        for link in plan.links:
            (sender, sends), (receiver, receives) = link.sender, link.receiver
            self._links[sender].append((True, sends, link.quota, link.receiver))
            self._links[receiver].append((False, receives, link.quota, link.sender))
        #: By mesh and axes, the group of each rank; and for each rank, the groups it uses.
        self._groups: list[Mapping[int, tuple[int, ...]]] = []
        self._collectives: dict[int, Sequence[int]] = {}
        known: dict[object, int] = {}
        of_actors: dict[int, Sequence[int]] = {}
        of_step: dict[int, int] = {}
        for part in plan.ranks:
            if id(part.actors) not in of_actors:
                used = {actor.step for actor in part.actors if isinstance(actor, Collective)}
                for index in used - of_step.keys():
                    step = plan.steps[index]
                    what = step.source[0], step.axes
                    if what not in known:
                        known[what] = len(known)
                        groups = step.source[0].groups(*step.axes)
                        self._groups.append({rank: group for group in groups for rank in group})
                    of_step[index] = known[what]
                of_actors[id(part.actors)] = sorted({of_step[index] for index in used})
            self._collectives[part.rank] = of_actors[id(part.actors)]

    def of(self, classes: Mapping[int, int]) -> dict[int, tuple[Hashable, Hashable]]:
        """Return by rank the classes of its partners, by collectives and by links."""
        # The ranks of a group share the group's key, so it is computed once.
        groups = {id(group): group for of_rank in self._groups for group in of_rank.values()}
        met = {key: frozenset(map(classes.__getitem__, group)) for key, group in groups.items()}
        found: dict[int, tuple[Hashable, Hashable]] = {}
        for rank in classes:
            collectives = tuple(
                met[id(self._groups[number][rank])] for number in self._collectives[rank]
            )
            links = frozenset(
                (is_send, name, quota, classes[other], actor)
                for is_send, name, quota, (other, actor) in self._links[rank]
            )
            found[rank] = collectives, links
        return found
