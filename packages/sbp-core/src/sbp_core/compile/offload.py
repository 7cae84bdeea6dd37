"""Offload: states that lie in host memory are copied to the device for their update, and back.

before: optimizer.0.1             m2 = mul(m, ..)   w2 = addcdiv(w, m2, ..)     writes m, w
after:  fetch.0.1                 m@device = to_device(m)
        optimizer.0.1.offload.1   m2 = mul(m@device, ..)   w2 = addcdiv(w, m2, ..)   writes w
        store.0.1                 m@host = to_host(m, m2)                            writes m

Fetches fire on a thread of their own, and so do stores, as links to the host go on beside compute.
States are fetched in groups: those of one parameter together, of small ones several, so that each
group has at least half of the bytes of the largest parameter's; else the small ones between large
ones would keep these from following each other. The update of each group is a segment of its own;
what needs several groups, such as a norm of all updates, is one behind them.

    host to device   fetch 1  fetch 2            fetch 3            fetch 4
    compute                   update 1           update 2           update 3
    device to host                     store 1            store 2            store 3

At most `in_flight` groups are on the device at a time: a fetch waits for the group that many before
it to be stored, by a register without values. It waits likewise for all that its update takes of
others, such as gradients, so that no copy is there before it can be used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sbp_core.compile.actors import Actor, Compute
from sbp_core.compile.dataflow import Successors, downstream, successors
from sbp_core.compile.items import Held, Item, ItemKind, Lowered
from sbp_core.compile.physical import PhysicalPlan, RankPlan, Register
from sbp_core.compile.program import Program
from sbp_core.graph.ir import Phase, Rate
from sbp_core.graph.primitives import TO_DEVICE, TO_HOST

#: The threads of a rank that copy.
FETCH_THREAD, STORE_THREAD = "host to device", "device to host"

#: The groups that a value depends on.
_Groups = frozenset[int]

_NONE: _Groups = frozenset()


def offload(program: Program) -> Lowered:
    """Return the items with copies of offloaded states, and updates in groups.

    Args:
        program: With levels and pieces, of a strategy that `legality` accepts.
    """
    lowered = program.lowered
    offloaded = [name for name, one in program.strategy.storage.items() if one.offloaded]
    if not offloaded:
        return lowered
    items = _topological(lowered.items)
    names = set(offloaded)
    used = [item for item in items if not names.isdisjoint(item.inputs)]
    writers = {key: item for item in items for key in item.outputs}
    groups = _groups(program, offloaded, used, writers)
    found = Lowered(
        items=[],
        held=dict(lowered.held),
        results=lowered.results,
        new_states=dict(lowered.new_states),
    )
    first: dict[str, Item] = {}
    for item in used:
        for key in item.inputs:
            if key in groups:
                first.setdefault(key, item)
    for state, item in first.items():
        stage = lowered.held[state].stage
        fetched = _copy(ItemKind.FETCH, state, (state,), stage, item, groups[state])
        found.items.append(fetched)
        found.held[fetched.name] = lowered.held[state]
    renamed = [
        replace(item, inputs=tuple(_on_device(k) if k in first else k for k in item.inputs))
        for item in items
    ]
    labels = _labels(renamed, {_on_device(state): groups[state] for state in first})
    by_name = {item.name: replace(item, group=labels[item.name]) for item in renamed}
    found.items += [by_name[item.name] for item in lowered.items]
    for state, key in lowered.new_states.items():
        if state not in groups:
            continue
        held = lowered.held[state]
        stored = _copy(ItemKind.STORE, state, (state, key), held.stage, writers[key], groups[state])
        found.items.append(stored)
        found.held[stored.name] = Held(held.value, held.stage, held.sbp, held.kind)
        found.new_states[state] = stored.name
    return found


def _on_device(state: str) -> str:
    return f"{state}@device"


def _copy(
    kind: ItemKind, state: str, inputs: tuple[str, ...], stage: int, beside: Item, group: int
) -> Item:
    """Return the copy of a state for an item that uses it, or of what one makes."""
    name = _on_device(state) if kind is ItemKind.FETCH else f"{state}@host"
    return Item(
        name=name, kind=kind, inputs=inputs, outputs=(name,), stage=stage, target_stage=stage,
        phase=Phase.OPTIMIZER, rate=Rate.STEP, level=beside.level, piece=beside.piece, group=group,
    )  # fmt: skip


def _topological(items: Sequence[Item]) -> list[Item]:
    """Return items behind those that make what they take; cuts list segments in other orders."""
    makers = {key: item for item in items for key in item.outputs}
    done: dict[str, Item] = {}
    for root in items:
        todo = [root]
        while todo:
            item = todo[-1]
            before = [makers[k] for k in item.inputs if k in makers]
            waits = [one for one in before if one.name not in done]
            if waits and item.name not in done:
                todo += waits
            else:
                done.setdefault(todo.pop().name, item)
    return list(done.values())


def owner_of(state: str) -> str:
    """Return what a state is one of several states of, by its name: a parameter."""
    return state.rpartition(".")[0] or state


def _groups(
    program: Program, offloaded: Sequence[str], used: Sequence[Item], writers: Mapping[str, Item]
) -> dict[str, int]:
    """Return the number of each state's group, in the order in which they are used, from 1."""
    when: dict[str, tuple[int, int, int]] = {}
    states = set(offloaded)
    for place, item in enumerate(used):
        for state in states.intersection(item.inputs):
            turn = item.level, item.piece, place
            when[state] = min(turn, when.get(state, turn))
    for state, key in program.lowered.new_states.items():
        if state in states:
            when.setdefault(state, (writers[key].level, writers[key].piece, len(used)))
    owners: dict[tuple[int, str], list[str]] = defaultdict(list)
    for state in sorted(when, key=lambda name: (when[name], name)):
        owners[program.strategy.storage[state].stage, owner_of(state)].append(state)
    sizes = {one: sum(map(program.bytes_of, names)) for one, names in owners.items()}
    largest = max(sizes.values(), default=0)
    found: dict[str, int] = {}
    number, held, stage = 1, 0, -1
    for one, names in owners.items():
        is_full = 2 * held >= largest and held + sizes[one] > largest
        if held and (is_full or stage != one[0]):
            number, held = number + 1, 0
        stage, held = one[0], held + sizes[one]
        found |= dict.fromkeys(names, number)
    return found


def _labels(items: Sequence[Item], fetched: Mapping[str, int]) -> dict[str, int]:
    """Return the group that each item is updated with: 0 for none, one behind the last for several.

    Within a segment what an item depends on only grows along the data, and what depends on no group
    goes with its users if they are all of one. So the parts of a segment do not wait for each other
    in a circle.

    Args:
        items: In topological order, with the keys of what is fetched.
        fetched: The group of each of these.
    """
    of_keys: dict[str, _Groups] = {key: frozenset((group,)) for key, group in fetched.items()}
    behind = 1 + max(fetched.values(), default=0)
    labels: dict[str, int] = {}
    users: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups = _NONE.union(*(of_keys.get(key, _NONE) for key in item.inputs))
        if groups:
            of_keys |= dict.fromkeys(item.outputs, groups)
        is_update = item.is_inside and item.phase is Phase.OPTIMIZER and item.rate is Rate.STEP
        # Several groups depend on all of these: no part of one of them.
        number = next(iter(groups)) if len(groups) == 1 else behind
        labels[item.name] = number if groups and is_update else 0
        for key in item.inputs:
            users[key].append(item)
    for item in reversed(items):
        if labels[item.name] or item.phase is not Phase.OPTIMIZER or not item.is_inside:
            continue
        found = [user for key in item.outputs for user in users[key]]
        numbers = {labels[user.name] for user in found}
        # Else what is made for each update, such as a decayed gradient, would be there for all.
        if len(numbers) == 1 and all(user.segment == item.segment for user in found):
            labels[item.name] = numbers.pop()
    return labels


def bound_copies(plan: PhysicalPlan, in_flight: int) -> PhysicalPlan:
    """Return the plan with registers without values that keep states from being fetched too early.

    Args:
        plan: Without firing orders.
        in_flight: Most groups that are on the device at a time; at least 1.
    """
    fetches = {a.name: a for part in plan.distinct for a in part.actors if _copies(a, TO_DEVICE)}
    if not fetches:
        return plan
    # A new value may need no old one; it is stored behind the fetch of its group all the same, as
    # the state is written over then, and the group is done with it.
    plan = _with_registers(plan, _stored_behind)
    flow = successors(plan)
    behind = downstream(flow, fetches)
    # Of each actor, the last of the fetches that it waits for. A fetch never waits for what waits
    # for itself or a later one: so there is no circle.
    last: dict[str, int] = {}
    for name in sorted(fetches, key=_number, reverse=True):
        for one in _unmet(flow, name, last):
            last[one] = _number(name)
    return _with_registers(plan, lambda part: _tokens(part, in_flight, behind, last))


def _with_registers(
    plan: PhysicalPlan, more: Callable[[RankPlan], Iterator[Register]]
) -> PhysicalPlan:
    """Return the plan with more registers; ranks that share theirs go on to do so."""
    known: dict[object, tuple[Register, ...]] = {}
    ranks = []
    for part in plan.ranks:
        what = id(part.actors), id(part.registers)
        if what not in known:
            known[what] = (*part.registers, *more(part))
        ranks.append(replace(part, registers=known[what]))
    return replace(plan, ranks=tuple(ranks))


def fetched_keys(actor: Actor) -> tuple[str, ...]:
    """Return the keys of the copies that a fetch makes; none of any other actor."""
    entries = actor.instructions if isinstance(actor, Compute) else ()
    return tuple(key for entry in entries if entry.op == TO_DEVICE for key in entry.outputs)


def _copies(actor: Actor, op: str) -> bool:
    return isinstance(actor, Compute) and any(one.op == op for one in actor.instructions)


def _number(name: str) -> int:
    """Return the number of the group that a fetch or store is of, which its name ends with."""
    return int(name.rpartition(".")[2])


def _unmet(flow: Successors, name: str, met: Mapping[str, int]) -> Iterator[str]:
    """Yield an actor and those behind it that were not met before."""
    todo, found = [name], {name}
    while todo:
        one = todo.pop()
        if one not in met:
            yield one
        new = {user for user in flow[one] if user not in met} - found
        found |= new
        todo += new


def _stored_behind(part: RankPlan) -> Iterator[Register]:
    """Yield what lets each store of a rank wait for the fetch of its group."""
    stores = {_number(a.name): a.name for a in part.actors if _copies(a, TO_HOST)}
    for actor in part.actors:
        if _copies(actor, TO_DEVICE) and (store := stores.get(_number(actor.name))):
            yield _token(actor.name, store)


def _token(producer: str, consumer: str) -> Register:
    """Return a register without values, by which an actor waits for another."""
    return Register(
        name=f"{producer}>{consumer}",
        producer=producer,
        consumers=(consumer,),
        keys=(),
        rate=Rate.STEP,
        quota=1,
    )


def _tokens(
    part: RankPlan, in_flight: int, behind: set[str], last: Mapping[str, int]
) -> Iterator[Register]:
    """Yield what each fetch of a rank waits for."""
    fetches = sorted((a.name for a in part.actors if _copies(a, TO_DEVICE)), key=_number)
    stores = {_number(a.name): a.name for a in part.actors if _copies(a, TO_HOST)}
    users = {
        name: dict.fromkeys(user for one in part.outputs_of[name] for user in one.consumers)
        for name in fetches
    }
    for place, name in enumerate(fetches):
        waits: dict[str, None] = {}
        for user in users[name]:
            makers = (register.producer for register in part.inputs_of[user])
            waits |= dict.fromkeys(maker for maker in makers if maker not in behind)
        if place >= in_flight:
            before = fetches[place - in_flight]
            over = [*users[before], *filter(None, [stores.get(_number(before))])]
            waits |= dict.fromkeys(one for one in over if last[one] < _number(name))
        for one in waits:
            yield _token(one, name)
