"""Offload: states that are in host memory are copied to the device for their update, and back.

before: optimizer.0.1             m2 = mul(m, ..)   w2 = addcdiv(w, m2, ..)     writes m, w
after:  fetch.0.1                 m@device = to_device(m)
        optimizer.0.1.offload.1   m2 = mul(m@device, ..)   w2 = addcdiv(w, m2, ..)   writes w
        store.0.1                 m@host = to_host(m, m2)                            writes m

Fetches fire on a separate thread, and so do stores, because the links to the host work in
parallel with compute. States are fetched in groups: the states of one parameter together, and small
parameters several at a time, so that each group has at least half of the bytes of the largest
parameter's. Small groups between large ones would keep the large ones from following each other.
The update of each group is a separate segment, followed by everything that needs several groups,
such as a norm of all updates.

    host to device   fetch 1  fetch 2            fetch 3            fetch 4
    compute                   update 1           update 2           update 3
    device to host                     store 1            store 2            store 3

At most `in_flight` groups are on the device at a time: a fetch waits until the group `in_flight`
places before it is stored, by a register without values. It also waits for all other inputs of its
update, such as gradients, so that no copy arrives before it can be used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from sbp_core.compile.actors import Actor, Compute
from sbp_core.compile.dataflow import downstream, successors
from sbp_core.compile.items import Item, ItemKind, LoweredItems
from sbp_core.compile.physical import PhysicalPlan, RankPlan, Register, token
from sbp_core.compile.program import LoweredProgram
from sbp_core.graph.ir import Phase, Rate
from sbp_core.graph.primitives import TO_DEVICE

#: The threads of a rank that copy.
FETCH_THREAD, STORE_THREAD = "host to device", "device to host"


def offload(program: LoweredProgram) -> LoweredItems:
    """Return the items with copies of offloaded states, and updates in groups.

    Args:
        program: The lowered program, with levels and pieces; `legality` accepts its strategy.
    """
    lowered = program.lowered
    names = {name for name, one in program.strategy.storage.items() if one.offloaded}
    if not names:
        return lowered
    items = _topological(lowered.items)
    used = [item for item in items if not names.isdisjoint(item.inputs)]
    writers = {key: item for item in items for key in item.outputs}
    groups = _groups(program, names, used, writers)
    found = replace(lowered, items=[], held=dict(lowered.held), new_states=dict(lowered.new_states))
    first: dict[str, Item] = {}
    for item in used:
        for key in item.inputs:
            if key in groups:
                first.setdefault(key, item)

    def copied(kind: ItemKind, key: str, inputs: tuple[str, ...], beside: Item) -> None:
        """Add a copy: of a state for an item that uses it, or of a new value that one makes."""
        held, group = lowered.held[inputs[0]], groups[inputs[0]]
        found.held[key] = held
        found.items.append(
            Item(
                name=key, kind=kind, inputs=inputs, outputs=(key,), stage=held.stage,
                target_stage=held.stage, phase=Phase.OPTIMIZER, rate=Rate.STEP,
                level=beside.level, piece=beside.piece, group=group,
            )
        )  # fmt: skip

    fetched = {state: f"{state}@device" for state in first}
    for state, item in first.items():
        copied(ItemKind.FETCH, fetched[state], (state,), item)
    renamed = [
        replace(item, inputs=tuple(fetched.get(key, key) for key in item.inputs)) for item in items
    ]
    labels = _labels(renamed, {key: groups[state] for state, key in fetched.items()})
    by_name = {item.name: replace(item, group=labels[item.name]) for item in renamed}
    found.items += [by_name[item.name] for item in lowered.items]
    for state, key in lowered.new_states.items():
        if state in groups:
            found.new_states[state] = stored = f"{state}@host"
            copied(ItemKind.STORE, stored, (state, key), writers[key])
    return found


def copy_name(item: Item) -> str:
    """Return the name of the actor that makes the copies of a group."""
    return f"{item.kind.value}.{item.stage}.{item.group}"


def _topological(items: Sequence[Item]) -> list[Item]:
    """Return items in topological order; cuts list segments in other orders."""
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
    """Return the parameter that a state belongs to, by its name."""
    return state.rpartition(".")[0] or state


def _groups(
    program: LoweredProgram, states: set[str], used: Sequence[Item], writers: Mapping[str, Item]
) -> dict[str, int]:
    """Return the number of each state's group, in the order in which they are used, from 1."""
    when: dict[str, tuple[int, int, int]] = {}
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
    """Return the group that each item is updated with: 0 for none, last + 1 for several.

    Within a segment, the set of groups that items depend on only grows along the data. An item that
    depends on no group goes with its users if all of them are in one group. So the parts of a
    segment do not wait for each other in a circle.

    Args:
        items: In topological order, with the keys of the fetched copies.
        fetched: The group of each of these keys.
    """
    #: The groups that each key depends on.
    of_keys = {key: frozenset((group,)) for key, group in fetched.items()}
    behind = 1 + max(fetched.values(), default=0)
    labels: dict[str, int] = {}
    users: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        groups = frozenset[int]().union(*(of_keys.get(key, ()) for key in item.inputs))
        if groups:
            of_keys |= dict.fromkeys(item.outputs, groups)
        is_update = item.is_inside and item.phase is Phase.OPTIMIZER and item.rate is Rate.STEP
        # Items that depend on several groups: users of all of them, part of none.
        number = next(iter(groups)) if len(groups) == 1 else behind
        labels[item.name] = number if groups and is_update else 0
        for key in item.inputs:
            users[key].append(item)
    for item in reversed(items):
        if labels[item.name] or item.phase is not Phase.OPTIMIZER or not item.is_inside:
            continue
        found = [user for key in item.outputs for user in users[key]]
        numbers = {labels[user.name] for user in found}
        # Otherwise values made for each update, such as decayed gradients, would all be alive.
        if len(numbers) == 1 and all(user.segment == item.segment for user in found):
            labels[item.name] = numbers.pop()
    return labels


def bound_copies(plan: PhysicalPlan, items: Iterable[Item], in_flight: int) -> PhysicalPlan:
    """Return the plan with registers without values that keep states from being fetched too early.

    Args:
        plan: A plan without firing orders.
        items: The items that it was made from.
        in_flight: Most groups that are on the device at a time; at least 1.
    """
    copies = {copy_name(i): i for i in items if i.kind in (ItemKind.FETCH, ItemKind.STORE)}
    stores = {i.group: name for name, i in copies.items() if i.kind is ItemKind.STORE}
    groups = {name: i.group for name, i in copies.items() if i.kind is ItemKind.FETCH}
    if not groups:
        return plan

    def stored_after(part: RankPlan) -> Iterator[Register]:
        # A new value may need no old one. It is still stored after the fetch of its group, because
        # the state is overwritten then, and the group is done with it.
        for actor in part.actors:
            if store := stores.get(groups.get(actor.name, 0)):
                yield token(actor.name, store)

    plan = _with_registers(plan, stored_after)
    flow = successors(plan)
    behind = downstream(flow, groups)
    # For each actor, the last fetch that it waits for. A fetch never waits for an actor that waits
    # for the same or a later fetch: so there is no circle.
    last: dict[str, int] = {}
    for name in sorted(groups, key=groups.__getitem__):
        last |= dict.fromkeys(downstream(flow, [name]), groups[name])

    def early_enough(part: RankPlan) -> Iterator[Register]:
        fetches = sorted(groups.keys() & part.by_name.keys(), key=groups.__getitem__)
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
                over = [*users[before], *filter(None, [stores.get(groups[before])])]
                waits |= dict.fromkeys(one for one in over if last[one] < groups[name])
            for one in waits:
                yield token(one, name)

    return _with_registers(plan, early_enough)


def _with_registers(
    plan: PhysicalPlan, more: Callable[[RankPlan], Iterator[Register]]
) -> PhysicalPlan:
    """Return the plan with more registers; ranks that share registers still share them."""
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
