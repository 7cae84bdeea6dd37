"""The network of a plan: what `sbp_core.dataflow` says of it is of steps that follow each other.

    plan                                   network; an iteration is a step
    actor                                  actor of that duration
    collective of a group                  one actor for all ranks, on the threads of all of them
    collective that overlaps               it begins on the threads; its flight is an actor of its
                                           own, and the links of a rank move one thing at a time
    register, channel                      edge with that quota, for each consumer
    register of carried states             edge with an initial token: the states themselves
    register of rate `step` behind an      edge that takes a token of each micro-batch, all of them
    actor that fires for each micro-batch  at once; the last of them is the filling
    order of a thread                      order of a processor

A step begins on a rank when the last one is through there, on all its threads and links; ranks that
are processes do not wait for each other beyond what registers and channels say. So the network says
what the plan itself allows, and a session whose ranks share a process may be slower: there a step
begins when all are through, which takes the latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sbp_core.compile.physical import (
    Actor,
    ActorId,
    Collective,
    PhysicalPlan,
    RankPlan,
    Register,
)
from sbp_core.dataflow import (
    FlowActor,
    FlowEdge,
    Network,
    cycle_lines,
    dead_cycle,
    sufficient_quotas,
)
from sbp_core.graph.ir import Rate

#: Quotas that are named.
_MOST_QUOTAS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """The actors of a network that an actor of a plan is: as it begins, and when it is over."""

    begin: str
    over: str


def plan_network(plan: PhysicalPlan) -> Network:
    """Return the network of a plan.

    Args:
        plan: With firing orders, whose parts fit together (see `sbp_core.check`).
    """
    return _PlanNetwork(plan).network()


def waits_without_order(plan: PhysicalPlan) -> tuple[list[str], str]:
    """Return why no order of firings exists: who waits for whom, and quotas that would be enough.

    Returns:
        The lines of a cycle of waits, and a sentence as from `quotas_to_raise`; both empty if
        registers and channels alone let the step end.
    """
    made = _PlanNetwork(plan)
    network = replace(made.network(), orders={})
    cycle = dead_cycle(network) or ()
    return cycle_lines(network, cycle), _told(made, sufficient_quotas(network))


def quotas_to_raise(plan: PhysicalPlan) -> str:
    """Return which quotas would have to be how large for a plan not to deadlock, as a sentence.

    Args:
        plan: With firing orders.

    Returns:
        An empty text if it does not deadlock; what to do instead if no quota helps.
    """
    made = _PlanNetwork(plan)
    return _told(made, sufficient_quotas(made.network()))


def _told(made: _PlanNetwork, needed: Mapping[str, int] | None) -> str:
    if needed is None:
        return "no quota helps: orders and data contradict each other; plan again"
    if not needed:
        return ""
    # The consumers of a register have an edge each, and its quota is for all of them.
    quotas: dict[str, tuple[int, int]] = {}
    for edge, tokens in needed.items():
        name, before, each = made.quota_of[edge]
        # The least whose tokens (see `_add_edges`) are enough.
        quotas[name] = before, max(-(-(tokens + 1) // each) - 1, quotas.get(name, (0, 0))[1])
    raised = [
        f"raise the quota of {name} from {before} to {quota}"
        for name, (before, quota) in quotas.items()
    ]
    more = [f"and {len(raised) - _MOST_QUOTAS} more"] * (len(raised) > _MOST_QUOTAS)
    text = ", ".join([*raised[:_MOST_QUOTAS], *more])
    return f"{text}; registers have theirs from in_flight of their stage"


class _PlanNetwork:
    """Makes the network of a plan."""

    def __init__(self, plan: PhysicalPlan) -> None:
        self._plan = plan
        #: For each edge with a quota the register or link that it is of, the quota there, and the
        #: tokens of a filling.
        self.quota_of: dict[str, tuple[str, int, int]] = {}
        self._actors: dict[str, FlowActor] = {}
        self._edges: list[FlowEdge] = []
        self._ends: dict[ActorId, _Ends] = {}
        #: For each rank the flights that its links move.
        self._flights: dict[int, set[str]] = defaultdict(set)

    def network(self) -> Network:
        """Return the network."""
        for part in self._plan.ranks:
            for actor in part.actors:
                if (part.rank, actor.name) not in self._ends:
                    self._add_actor(part.rank, actor)
        for part in self._plan.ranks:
            for register in part.registers:
                self._add_register(part, register)
        for link in self._plan.links:
            self._add_edges(f"link {link.name}", link.sender, link.receiver, link.quota)
        orders = dict(self._orders())
        return Network(actors=tuple(self._actors.values()), edges=tuple(self._edges), orders=orders)

    def _add_actor(self, rank: int, actor: Actor) -> None:
        ranks = [rank]
        if isinstance(actor, Collective):
            ranks = list(self._plan.steps[actor.step].group(rank))
        there = [self._plan.by_rank[other].by_name[actor.name] for other in ranks]
        # It is over on all ranks of its group at once, so the slowest counts.
        busy_s = max(one.busy_s for one in there)
        flight_s = max(one.time_s for one in there) - busy_s
        name = f"{_ranks(ranks)}'s {actor.name}"
        self._actors[name] = FlowActor(name=name, duration_s=busy_s)
        over = name
        if flight_s > 0:
            over = f"{name}, in flight"
            self._actors[over] = FlowActor(name=over, duration_s=flight_s)
            self._edges.append(FlowEdge(name=f"begin of {name}", producer=name, consumer=over))
            for other in ranks:
                self._flights[other].add(over)
        for other in ranks:
            self._ends[(other, actor.name)] = _Ends(begin=name, over=over)

    def _add_register(self, part: RankPlan, register: Register) -> None:
        producer = part.by_name[register.producer]
        tokens = 1
        if register.rate is Rate.STEP and producer.rate is Rate.MICRO:
            tokens = self._plan.num_micro_batches
        for consumer in dict.fromkeys(register.consumers):
            to = f" to {consumer}" if len(set(register.consumers)) > 1 else ""
            self._add_edges(
                f"register {register.name} of rank {part.rank}",
                (part.rank, register.producer),
                (part.rank, consumer),
                register.quota,
                suffix=to,
                consumed=tokens,
                initial=register.initial,
            )

    def _add_edges(
        self,
        name: str,
        producer: ActorId,
        consumer: ActorId,
        quota: int,
        *,
        suffix: str = "",
        consumed: int = 1,
        initial: int = 0,
    ) -> None:
        """Add the edge of a register or link, and another one for its credits if a side flies.

        Of `quota` fillings of several tokens, each takes its place with its last token, so those
        before may be there already: the tokens of `quota` fillings and all but one of the next.
        """
        edge, tokens = name + suffix, (quota + 1) * consumed - 1
        self.quota_of[edge] = name, quota, consumed
        ends = self._ends[producer], self._ends[consumer]
        if all(end.begin == end.over for end in ends):
            self._edges.append(
                FlowEdge(
                    name=edge, producer=ends[0].begin, consumer=ends[1].begin, consumed=consumed,
                    initial=initial, quota=tokens,
                )
            )  # fmt: skip
            return
        # A place is taken when the producer begins, and given back when the consumer is over.
        self._edges += [
            FlowEdge(
                name=edge, producer=ends[0].begin, consumer=ends[1].over, consumed=consumed,
                initial=initial, quota=tokens,
            ),
            FlowEdge(
                name=f"{edge}, when it is there", producer=ends[0].over, consumer=ends[1].begin,
                consumed=consumed, initial=initial,
            ),
        ]  # fmt: skip

    def _orders(self) -> Iterator[tuple[str, list[tuple[str, int]]]]:
        """Yield the orders of threads and links, and begin the steps of ranks that have several."""
        for part in self._plan.ranks:
            found: dict[str, list[tuple[str, int]]] = {}
            flown: list[tuple[str, int]] = []
            for thread, order in part.orders.items():
                name = f"thread {thread} of rank {part.rank}"
                ends = [(self._ends[(part.rank, actor)], index) for actor, index in order]
                found[name] = [(end.begin, index) for end, index in ends]
                flown += [(end.over, i) for end, i in ends if end.over in self._flights[part.rank]]
            if flown:
                found[f"links of rank {part.rank}"] = flown
            if len(found) > 1:
                start = f"step of rank {part.rank}"
                self._actors[start] = FlowActor(name=start)
                found = {name: [(start, 0), *order] for name, order in found.items()}
            yield from found.items()


def _ranks(ranks: list[int]) -> str:
    """Return ranks in words: `rank 3`, `ranks 0, 2`, `ranks 0-7`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
