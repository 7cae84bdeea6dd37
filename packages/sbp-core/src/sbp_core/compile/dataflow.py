"""Which actors come after which, and what may lie in the memory of states; by name, over all ranks.

Actors and keys are named alike on all ranks, so what holds on one is taken to hold on all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from sbp_core.compile.physical import Collective, Compute, PhysicalPlan, Receive
from sbp_core.graph.ir import refs
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.signatures.views import is_view

#: For each actor those that take what it makes.
Successors = Mapping[str, set[str]]


def successors(plan: PhysicalPlan) -> Successors:
    """Return for each actor those that take what it makes, by registers and by links."""
    found: dict[str, set[str]] = {a.name: set() for part in plan.ranks for a in part.actors}
    for part in plan.ranks:
        for register in part.registers:
            found[register.producer].update(register.consumers)
    for link in plan.links:
        found[link.sender[1]].add(link.receiver[1])
    return found


def downstream(flow: Successors, names: Iterable[str]) -> set[str]:
    """Return some actors and all that need them, directly or by others."""
    found = set(names)
    todo = list(found)
    while todo:
        new = flow[todo.pop()] - found
        found |= new
        todo += new
    return found


def memory_of_states(
    plan: PhysicalPlan, seeds: Mapping[str, Iterable[str]]
) -> dict[str, frozenset[str]]:
    """Return for each key which memory it may lie in.

    Args:
        plan: With or without firing orders.
        seeds: For some keys the memory that they are known to lie in, by any name.
    """
    sources: dict[str, set[str]] = defaultdict(set)
    seen: set[int] = set()
    for part in plan.ranks:
        for actor in part.actors:
            if isinstance(actor, Collective | Receive):
                # Threads of one process may hand each other what they have as it is.
                sources[actor.makes].update(actor.inputs, actor.reads)
            for entry in actor.instructions if isinstance(actor, Compute) else ():
                # Ranks share their instructions.
                if id(entry) in seen or not (entry.op == LOCAL_BOX or is_view(entry.op)):
                    continue
                seen.add(id(entry))
                for key in entry.outputs:
                    sources[key].update(ref.name for ref in refs(entry.args))
    for link in plan.links:
        send = plan.by_rank[link.sender[0]].by_name[link.sender[1]]
        receive = plan.by_rank[link.receiver[0]].by_name[link.receiver[1]]
        assert isinstance(receive, Receive), "a link leads to one that receives"
        sources[receive.makes].update(send.inputs, send.reads)
    users: dict[str, set[str]] = defaultdict(set)
    for key, taken in sources.items():
        for one in taken:
            users[one].add(key)
    found: dict[str, set[str]] = defaultdict(set)
    for key, memory in seeds.items():
        found[key].update(memory)
    todo = list(found)
    while todo:
        key = todo.pop()
        for user in users.get(key, ()):
            if not found[key] <= found[user]:
                found[user] |= found[key]
                todo.append(user)
    return {key: frozenset(memory) for key, memory in found.items()}


def looks_at(keys: Iterable[str], memory: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the memory that any of some keys may lie in."""
    return {name for key in keys for name in memory.get(key, ())}
