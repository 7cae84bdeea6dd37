"""Translate a plan to a synchronous dataflow network, to explain deadlocks and to time steps.

`sbp_core.dataflow` analyses the network. A quota is the most values that a register or channel may
hold, a filling is one of them, and the flight of a collective runs while its threads continue.

    plan                                   network; an iteration is a step
    actor                                  actor of that duration
    collective of a group                  one actor for all ranks, on the threads of all of them
    collective that overlaps               it begins on the threads; its flight is an actor of its
                                           own, and the links of a rank move one thing at a time;
                                           the transport's time on the threads is another actor
    register, channel                      edge with that quota, for each consumer
    register of carried states             edge with an initial token: the states themselves
    register of rate `step` after an       edge that takes a token of each micro-batch, all of them
    actor that fires for each micro-batch  at once; the last of them is the filling
    order of a thread                      order of a processor

Ranks that do the same are one rank of the network (`symmetry`), and results hold for all of them.
A cycle of waits among ranks is one of classes, and conversely, as there are finitely many ranks.

A step begins on a rank when the step before it has finished there, on all its threads and links.
Ranks that are processes wait for each other only at registers and channels. So the network shows
what the plan itself allows. A session whose ranks share a process may be slower: there a step
begins when all ranks have finished, so it takes the latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from sbp_core.compile.actors import Actor, ActorId, Collective
from sbp_core.compile.physical import PhysicalPlan, RankPlan, Register
from sbp_core.compile.symmetry import FoldedPlan, fold
from sbp_core.dataflow import (
    Dependency,
    FlowActor,
    FlowEdge,
    FlowFiring,
    Network,
    cycle_lines,
    dead_cycle,
    sufficient_quotas,
)
from sbp_core.graph.ir import Rate

#: Most quotas that a message names.
_MOST_QUOTAS = 6

#: Most ranks of a group that a message names, unless they are consecutive.
_MOST_RANKS = 4

#: For each thread the firings of a step, as in a rank plan.
Orders = Mapping[str, Sequence[tuple[str, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSpan:
    """The network actors that stand for an actor of a plan: for its begin, and for its end.

    `drag` follows the begin on its threads, if the transport needs their core; else it is empty.
    """

    begin: str
    over: str
    drag: str = ""


def waits_without_order(plan: PhysicalPlan) -> tuple[list[str], str]:
    """Return why no order of firings exists: the cycle of waits, and quotas that would be enough.

    Returns:
        The lines of a cycle of waits, and a sentence as from `quotas_to_raise`; both empty if
        registers and channels alone let the step end.
    """
    made = PlanNetwork(fold(plan))
    made.network = replace(made.network, orders={})
    return made.dead_cycle_lines(), made.quotas_to_raise()


class PlanNetwork:
    """A plan as a network.

    Args:
        folded: With firing orders; its parts fit together (see `sbp_core.check`).

    Attributes:
        network: The network of one rank of each class.
        ends: The network actors of each actor of these ranks.
        registers: The edges of each register, as (rank, name).
        links: The edges of the links that each actor sends on.
    """

    def __init__(self, folded: FoldedPlan) -> None:
        self._plan, self._folded = folded.plan, folded
        #: For each edge with a quota: its register or link, the quota there, and the tokens that a
        #: firing produces and consumes.
        self._quota_of: dict[str, tuple[str, int, int, int]] = {}
        #: A description of each actor of the network.
        self._words: dict[str, tuple[str, str]] = {}
        #: For actors that fire several times: the unit of one firing, in words.
        self._numbered: dict[str, str] = {}
        self._actors: dict[str, FlowActor] = {}
        self._edges: list[FlowEdge] = []
        self.ends: dict[ActorId, ActorSpan] = {}
        self.registers: dict[tuple[int, str], list[str]] = defaultdict(list)
        self.links: dict[ActorId, list[str]] = defaultdict(list)
        self.network = self._made()

    def cycle_lines(self, cycle: Sequence[Dependency]) -> list[str]:
        """Return the waits of a cycle, one line each."""

        def named(firing: FlowFiring) -> str:
            what, where = self._words[firing.actor]
            each = self._numbered.get(firing.actor)
            number = f" of {each} {firing.number}" if each else ""
            return f"{what}{number}{where}"

        return cycle_lines(self.network, cycle, iteration="step", named=named)

    def dead_cycle_lines(self) -> list[str]:
        """Return the lines of a cycle of waits within one step; none if the plan does not stop."""
        return self.cycle_lines(dead_cycle(self.network) or ())

    def quotas_to_raise(self) -> str:
        """Return which quotas have to be raised to what, to avoid the deadlock, as a sentence.

        Returns:
            Empty if there is no deadlock; another remedy if no quota helps.
        """
        needed = sufficient_quotas(self.network)
        if needed is None:
            return "no quota helps: orders and data contradict each other; plan again"
        if not needed:
            return ""
        # The consumers of a register have an edge each, and its quota is for all of them.
        quotas: dict[str, tuple[int, int]] = {}
        for edge, tokens in needed.items():
            name, before, produced, consumed = self._quota_of[edge]
            quotas[name] = (
                before,
                max(quota_of(tokens, produced, consumed), quotas.get(name, (0, 0))[1]),
            )
        raised = [
            f"raise the quota of {name} from {before} to {quota}"
            for name, (before, quota) in quotas.items()
        ]
        more = [f"and {len(raised) - _MOST_QUOTAS} more"] * (len(raised) > _MOST_QUOTAS)
        text = ", ".join([*raised[:_MOST_QUOTAS], *more])
        return f"{text}; registers have theirs from in_flight of their stage"

    def orders_of(self, rank: int, orders: Orders) -> dict[str, list[tuple[str, int]]]:
        """Return the orders of processors that correspond to orders of a rank's threads."""
        found: dict[str, list[tuple[str, int]]] = {}
        for thread, order in orders.items():
            ends = [(self.ends[(rank, actor)], index) for actor, index in order]
            found[f"thread {thread} of rank {rank}"] = [
                (name, i) for end, i in ends for name in (end.begin, end.drag) if name
            ]
            # The compiler lets one thread of a rank begin all its flights.
            flights = [(end.over, i) for end, i in ends if end.over != end.begin]
            if flights:
                found[f"links of rank {rank} by thread {thread}"] = flights
        if len(found) > 1:
            found = {name: [(f"step of rank {rank}", 0), *order] for name, order in found.items()}
        return found

    def _made(self) -> Network:
        for part in self._plan.ranks:
            for actor in part.actors:
                if (part.rank, actor.name) not in self.ends:
                    self._add_actor(part.rank, actor)
        for part in self._plan.ranks:
            for register in part.registers:
                self._add_register(part, register)
        for link in self._plan.links:
            edge = self._add_edges(f"link {link.name}", link.sender, link.receiver, link.quota)
            self.links[link.sender].append(edge)
        orders: dict[str, list[tuple[str, int]]] = {}
        for part in self._plan.ranks:
            of_rank = self.orders_of(part.rank, part.orders)
            if len(of_rank) > 1:
                start = f"step of rank {part.rank}"
                self._actors[start] = FlowActor(name=start)
                self._words[start] = start, ""
            orders |= of_rank
        return Network(actors=tuple(self._actors.values()), edges=tuple(self._edges), orders=orders)

    def _add_actor(self, rank: int, actor: Actor) -> None:
        group = [rank]
        if isinstance(actor, Collective):
            group = list(self._plan.steps[actor.step].group(rank))
        ranks = dict.fromkeys(self._folded.stands_for[other] for other in group)
        there = [self._plan.by_rank[other].by_name[actor.name] for other in ranks]
        # It ends on all ranks of its group at once, so the slowest counts.
        begun_s = max(one.begun_s for one in there)
        flight_s = max(one.time_s for one in there) - begun_s
        drag_s = max(one.busy_s - one.begun_s for one in there)
        name = f"{actor.name} of {_ranks(group)}"
        where = f" on {_ranks(group)}{self._others(group)}"
        self._actors[name] = FlowActor(name=name, duration_s=begun_s)
        self._words[name] = f"stage {actor.stage}'s {actor.name}", where

        def follows(edge: str, what: str, where: str, duration_s: float) -> str:
            after = f"{name}, {what}"
            self._actors[after] = FlowActor(name=after, duration_s=duration_s)
            self._words[after] = self._words[name][0], where
            self._edges.append(FlowEdge(name=f"{edge} of {name}", producer=name, consumer=after))
            return after

        over, drag = name, ""
        if flight_s > 0:
            over = follows("begin", "in flight", f"{where}, in flight,", flight_s)
        if drag_s > 0:
            drag = follows("drag", "on its threads", f"{where}, under way,", drag_s)
        if actor.num_firings(self._plan.repetitions) > 1:
            each = "update" if actor.rate is Rate.UPDATE else "micro-batch"
            self._numbered |= dict.fromkeys((name, over, drag), each)
        for other in ranks:
            self.ends[(other, actor.name)] = ActorSpan(begin=name, over=over, drag=drag)

    def _others(self, group: Sequence[int]) -> str:
        """Return in words how many more ranks or groups of the same class there are."""
        alike = self._folded.members[self._folded.stands_for[group[0]]]
        here = len(set(group).intersection(alike))
        more = len(alike) // here - 1
        return f" (and {more} alike)" if more else ""

    def _add_register(self, part: RankPlan, register: Register) -> None:
        producer = part.by_name[register.producer]
        consumed = self._plan.firings_per_filling(producer, register)
        for consumer in dict.fromkeys(register.consumers):
            reader = part.by_name[consumer]
            to = f" to {consumer}" if len(set(register.consumers)) > 1 else ""
            edge = self._add_edges(
                f"register {register.name} of rank {part.rank}{self._others([part.rank])}",
                (part.rank, register.producer),
                (part.rank, consumer),
                register.quota,
                suffix=to,
                produced=self._plan.firings_per_filling(reader, register),
                consumed=consumed,
                initial=register.initial,
            )
            self.registers[part.rank, register.name].append(edge)

    def _add_edges(
        self,
        name: str,
        producer: ActorId,
        consumer: ActorId,
        quota: int,
        *,
        suffix: str = "",
        produced: int = 1,
        consumed: int = 1,
        initial: int = 0,
    ) -> str:
        """Add the edge of a register or link, and another one for its data if a side is in flight.

        Quota and initial fillings belong to the register. A filling is one token, with exceptions:
        `consumed` tokens if several firings of its producer make it, `produced` tokens if several
        firings of its consumer take it.

        Returns:
            The name of the edge that has the quota.
        """
        edge, tokens = name + suffix, tokens_of(quota, produced, consumed)
        self._quota_of[edge] = name, quota, produced, consumed
        initial *= produced
        ends = self.ends[producer], self.ends[consumer]
        if all(end.begin == end.over for end in ends):
            self._edges.append(
                FlowEdge(
                    name=edge, producer=ends[0].begin, consumer=ends[1].begin, produced=produced,
                    consumed=consumed, initial=initial, quota=tokens,
                )
            )  # fmt: skip
            return edge
        # A place is taken when the producer begins, and given back when the consumer ends.
        self._edges += [
            FlowEdge(
                name=edge, producer=ends[0].begin, consumer=ends[1].over, produced=produced,
                consumed=consumed, initial=initial, quota=tokens,
            ),
            FlowEdge(
                name=f"{edge}, when it is there", producer=ends[0].over, consumer=ends[1].begin,
                produced=produced, consumed=consumed, initial=initial,
            ),
        ]  # fmt: skip
        return edge


def tokens_of(quota: int, produced: int, consumed: int) -> int:
    """Return the number of tokens in a quota of fillings.

    A filling that one firing makes, for several firings of its consumer, takes its place at once. A
    filling made by several firings takes its place with its last token, so the earlier ones may be
    there already: the tokens of `quota` fillings and all but one of the next.
    """
    return quota * produced if produced > 1 else (quota + 1) * consumed - 1


def quota_of(tokens: int, produced: int, consumed: int) -> int:
    """Return the least quota of fillings whose tokens (see `tokens_of`) are enough."""
    return -(-tokens // produced) if produced > 1 else -(-(tokens + 1) // consumed) - 1


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 3`, `ranks 0, 2`, `ranks 0-7`, `ranks 0, 64, .., 960`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) > _MOST_RANKS and len({b - a for a, b in pairwise(ranks)}) == 1:
        return f"ranks {ranks[0]}, {ranks[1]}, .., {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
