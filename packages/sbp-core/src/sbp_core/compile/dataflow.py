"""Find which actors of a plan take whose results, and which values may alias model states.

The compiler needs this to order work and to overwrite states safely. Actors (units of work of a
rank) and keys (names of values) are the same on all ranks, so a fact about one rank is taken to
hold on all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sbp_core.compile.actors import Collective, Compute, Receive
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.graph.ir import refs
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.signatures.views import is_view

#: For each actor the actors that take its results.
Successors = Mapping[str, set[str]]


def successors(plan: PhysicalPlan) -> Successors:
    """Return for each actor the actors that take its results, by registers and by links."""
    few = plan.distinct
    found: dict[str, set[str]] = {a.name: set() for part in few for a in part.actors}
    for part in few:
        for name, users in rank_successors(part).items():
            found[name] |= users
    for link in plan.links:
        found[link.sender[1]].add(link.receiver[1])
    return found


def rank_successors(part: RankPlan) -> Successors:
    """Return for each actor of a rank the actors of the same rank that take its results."""
    found: dict[str, set[str]] = {actor.name: set() for actor in part.actors}
    for register in part.registers:
        found[register.producer].update(register.consumers)
    return found


def downstream(flow: Successors, names: Iterable[str]) -> set[str]:
    """Return some actors and all actors that need them, directly or through other actors."""
    found = set(names)
    todo = list(found)
    while todo:
        new = flow[todo.pop()] - found
        found |= new
        todo += new
    return found


#: The prefix of memory that belongs to another rank, or may do so.
BOXED = "boxed "


def memory_of_states(
    plan: PhysicalPlan, seeds: Mapping[str, Iterable[str]]
) -> dict[str, frozenset[str]]:
    """Return for each key the memory that it may be in.

    Threads of one process may pass values to each other without a copy. So a result of boxing may
    be in the memory of any rank that takes part: from a shard in memory `m` it is in `boxed m`.

    Args:
        plan: With or without firing orders.
        seeds: For some keys the memory that they are known to be in, by any name.
    """
    users = _users_of_memory(plan)
    found: dict[str, set[str]] = defaultdict(set)
    for key, memory in seeds.items():
        found[key].update(memory)
    todo = list(found)
    while todo:
        key = todo.pop()
        for user, is_boxed in users.get(key, ()):
            memory = found[key]
            if is_boxed:
                memory = {m if m.startswith(BOXED) else BOXED + m for m in memory}
            if not memory <= found[user]:
                found[user] |= memory
                todo.append(user)
    return {key: frozenset(memory) for key, memory in found.items()}


def _users_of_memory(plan: PhysicalPlan) -> Mapping[str, set[tuple[str, bool]]]:
    """Return for each key the keys that may be in its memory, and whether boxing makes them."""
    users: dict[str, set[tuple[str, bool]]] = defaultdict(set)
    seen: set[int] = set()
    for part in plan.distinct:
        for actor in part.actors:
            if isinstance(actor, Collective | Receive):
                for key in (*actor.inputs, *actor.reads):
                    users[key].add((actor.makes, True))
            for entry in actor.instructions if isinstance(actor, Compute) else ():
                # Ranks share their instructions.
                if id(entry) in seen or not may_be_view(entry.op):
                    continue
                seen.add(id(entry))
                for ref in refs(entry.args):
                    users[ref.name].update((key, False) for key in entry.outputs)
    for link in plan.links:
        send = plan.by_rank[link.sender[0]].by_name[link.sender[1]]
        receive = plan.by_rank[link.receiver[0]].by_name[link.receiver[1]]
        assert isinstance(receive, Receive), "a link leads to one that receives"
        for key in (*send.inputs, *send.reads):
            users[key].add((receive.makes, True))
    return users


def may_be_view(op: str) -> bool:
    """Whether a result of an operator may be in the memory of an argument."""
    return op == LOCAL_BOX or is_view(op)


def looks_at(keys: Iterable[str], memory: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the memory that any of some keys may be in."""
    return {name for key in keys for name in memory.get(key, ())}
