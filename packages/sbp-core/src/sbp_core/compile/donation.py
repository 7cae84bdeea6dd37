"""Let new values of states take the memory of the old ones, once nothing reads the old ones.

before: a = addcdiv(v, ...); b = matmul(w, ...)       [kept to the end of the step, next to v, w]
after:  a = addcdiv_(v, ...); b = matmul(w, ...); w <- b                     (`Actor.in_place`)

An update with an in-place form writes over its state. The result of any other update is copied over
the state as soon as nothing in its segment, and no boxing after its firing, reads the old value any
more (`overwriting`). No update begins before the commit of the step (`commit`), and by then all
other work is finished on every rank. So every reader of an old value that needs no update has
already read it, on whatever thread or rank.

If only one segment takes a copy of an offloaded state (`offload`), the copy is donated to it in the
same way: the new value, which is then stored, takes the memory of the copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sbp_core.compile.actors import Actor, Compute, Send
from sbp_core.compile.dataflow import (
    BOXED,
    Successors,
    downstream,
    looks_at,
    memory_of_states,
    successors,
)
from sbp_core.compile.offload import fetched_keys
from sbp_core.compile.overwriting import Overwriting
from sbp_core.compile.physical import PhysicalPlan, RankPlan
from sbp_core.graph.ir import Phase, Rate

#: The prefix of a state's name that means the memory of its new value.
_NEW = "new "


def donate_states(plan: PhysicalPlan) -> PhysicalPlan:
    """Return the plan with `in_place` set on every actor that may overwrite states.

    A state may be overwritten by an actor of the optimizer phase that fires once a step, if on all
    ranks every other actor that uses its memory does so before the commit, or passes its result to
    that actor; and if no result and no other state is in its memory, old or new.

    Args:
        plan: A plan without firing orders.
    """
    plan_memory = _Memory.of(plan)
    writers = plan_memory.candidates()
    flow = successors(plan)
    while True:
        after = downstream(flow, {name for names in writers.values() for name in names})
        late = {
            s for s, names in writers.items() if _is_read_late(plan_memory, flow, after, s, names)
        }
        if not late:
            break
        # If nothing is overwritten after all, it may run before the commit, with all its followers.
        writers = {state: names for state, names in writers.items() if state not in late}
    rewriting = Overwriting(plan_memory.of_keys)
    # Ranks that share actors still share them.
    donated = {id(part.actors): _donated(part) for part in plan.distinct}
    done: dict[tuple[int, tuple[str, ...]], Actor] = {}
    changed: dict[int, tuple[Actor, ...]] = {}
    for key, actors in {id(part.actors): part.actors for part in plan.ranks}.items():
        keys = [(id(actor), donated[key].get(actor.name, ())) for actor in actors]
        for one, actor in zip(keys, actors, strict=True):
            # The states that it writes and the copies that it takes which it may overwrite.
            taken = tuple(s for s, _ in actor.writes if actor.name in writers.get(s, ()))
            if one not in done and isinstance(actor, Compute) and (taken or one[1]):
                done[one] = rewriting.of(replace(actor, in_place=taken, donated=one[1]))
            elif one not in done and not isinstance(actor, Compute | Send) and taken:
                done[one] = replace(actor, in_place=taken)
            done.setdefault(one, actor)
        changed[key] = tuple(done[one] for one in keys)
    ranks = tuple(replace(part, actors=changed[id(part.actors)]) for part in plan.ranks)
    return replace(plan, ranks=ranks)


@dataclass(frozen=True)
class _Memory:
    """Which actors use the memory of which state, by name, over all ranks.

    Args:
        of_keys: For each key the memory that it may be in, of states, old or new.
        lookers: For each state the actors that take a value in its memory; for `boxed STATE` the
            actors that do so on other ranks, or may.
        sent: For each state the boxing actors among them.
        writers: For each tensor that is a state, the actors that make its new value.
        exposed: States whose memory, old or new, a result or another state may be in.
    """

    of_keys: Mapping[str, frozenset[str]]
    lookers: Mapping[str, set[str]]
    sent: Mapping[str, set[str]]
    writers: Mapping[str, Mapping[str, Actor]]
    exposed: frozenset[str]

    @classmethod
    def of(cls, plan: PhysicalPlan) -> _Memory:
        few = plan.distinct
        states = {slot.name for part in few for slot in part.slots if slot.sbp is not None}
        seeds: dict[str, set[str]] = {name: {name} for name in states}
        for part in few:
            for actor in part.actors:
                seeds |= {key: {key} for key in fetched_keys(actor)}
        written = {pair for part in few for actor in part.actors for pair in actor.writes}
        for state, key in written:
            seeds.setdefault(key, set()).add(f"{_NEW}{state}")
        of_keys = memory_of_states(plan, seeds)
        lookers: dict[str, set[str]] = defaultdict(set)
        sent: dict[str, set[str]] = defaultdict(set)
        writers: dict[str, dict[str, Actor]] = defaultdict(dict)
        exposed: set[str] = set()
        for part in few:
            for actor in part.actors:
                for name in looks_at((*actor.inputs, *actor.reads), of_keys):
                    lookers[name].add(actor.name)
                    if not isinstance(actor, Compute):
                        sent[name].add(actor.name)
                for state, _ in actor.writes:
                    if state in states:
                        writers[state][actor.name] = actor
                exposed |= looks_at((key for _, key in actor.emits), of_keys)
        for state, key in written:
            exposed |= of_keys[key] - {f"{_NEW}{state}"}
        return cls(of_keys, lookers, sent, writers, frozenset(exposed))

    def candidates(self) -> dict[str, set[str]]:
        """Return the states that their writers allow to be overwritten, with those writers."""
        return {
            state: set(actors)
            for state, actors in self.writers.items()
            if not {m for n in (state, f"{_NEW}{state}") for m in (n, BOXED + n)} & self.exposed
            # A value that is written for each micro-batch goes to the next through a register; a
            # value of the forward phase is in force after the step, not before.
            and all(
                actor.rate is Rate.STEP and actor.phase is Phase.OPTIMIZER
                for actor in actors.values()
            )
        }


def _is_read_late(
    memory: _Memory, flow: Successors, after: set[str], state: str, writers: Iterable[str]
) -> bool:
    """Whether an old value may be used after its writer has begun."""
    own = set(writers)
    # Other ranks, and boxing for them, are in step only up to the commit.
    elsewhere = memory.lookers.get(BOXED + state, set()) | memory.sent.get(state, set())
    if elsewhere & after or len(own) > 1:
        return True
    others = (memory.lookers.get(state, set()) & after) - own
    # A later update that passes its result to the writer has used the old value before.
    return any(not own <= downstream(flow, {name}) for name in others)


def _donated(part: RankPlan) -> dict[str, tuple[str, ...]]:
    """Return for each actor the copies of offloaded states that no other actor takes."""
    found: dict[str, tuple[str, ...]] = {}
    for register in part.registers:
        fetched = fetched_keys(part.by_name[register.producer])
        if len(register.consumers) == 1 and fetched:
            (name,) = register.consumers
            keys = tuple(key for key in register.keys if key in fetched)
            found[name] = (*found.get(name, ()), *keys)
    return found
