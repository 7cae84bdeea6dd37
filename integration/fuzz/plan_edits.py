"""Structured edits of a plan, some of which the checker accepts.

They make changes that a planner, a compiler or a person might make: another operator or argument,
another step between the ranks, another order, another quota, another part of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from random import Random
from typing import Any

import torch

from sbp_core.boxing import BoxingStep, StepKind, collective_bytes, transfer_bytes
from sbp_core.errors import SbpError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, local_shape
from sbp_core.serialize import load
from sbp_core.testing.edits import edited

Json = dict[str, Any]

#: Operators that an edit may insert.
_REACHING = (
    "aten.save.default", "aten.from_file.default", "aten.copy_.default",
    "aten.resize_.default", "aten.set_.source_Tensor", "aten._foobar.default",
    "prim.Print.default", "host.pow", "host.eval", "host.item", "c10d.barrier.default",
    "sbp.local_box", "profiler._record_function_enter.default", "sbp.accumulate",
    "sbp.after", "sbp.fused_adam_", "aten.add_.Tensor", "os.system", "__import__",
    "aten.as_strided.default", "aten.empty.memory_format", "aten.nonzero.default",
    "aten.mm.default",
)  # fmt: skip

_ARGUMENTS: tuple[Any, ...] = (
    0, 1, -1, 2**40, 2**63 - 1, 1.5, None, True, "x", "/etc/passwd", [], [1 << 40], [[]],
    {"dtype": "float32"}, {"dtype": "os"}, {"device": "meta"}, {"device": "cuda"},
    {"layout": "sparse_coo"}, {"memory_format": "channels_last"}, {"dtype": "nothing; import os"},
)  # fmt: skip

_ENTRIES = ("S(0)", "S(1)", "B", "P", "P(max)")

_PARTS_OF_ACTORS = (
    "rate", "phase", "stage", "reads", "inputs", "outputs", "writes", "emits", "in_place", "makes",
    "begin_s", "thread", "accumulates", "name",
)  # fmt: skip

#: Errors of an edit on a plan that an earlier edit has broken.
_BROKEN = (LookupError, TypeError, ValueError, AttributeError, SbpError)


@cache
def _operators() -> tuple[str, ...]:
    """Return operators of all kinds that torch has."""
    names = [schema.replace("::", ".") for schema in torch._C._dispatch_get_all_op_names()]
    aten = [name if name.count(".") > 1 else f"{name}.default" for name in names]
    return (*sorted(aten), *_REACHING * 20)


def edited_plan(value: Any, random: Random) -> Any:
    """Return a plan with one structured edit, or an edit of any JSON value."""
    if random.random() < 0.25:
        return edited(value, random)
    copy = deepcopy(value)
    try:
        random.choice(_EDITS)(copy, random)
    except _BROKEN:
        return edited(value, random)
    return copy


# Operators.


def _calls(plan: Json) -> list[Json]:
    return [call for actor in _actors(plan) for call in actor.get("instructions", [])]


def _edit_operator(plan: Json, random: Random) -> None:
    calls = _calls(plan)
    call, other = random.choice(calls), random.choice(calls)
    call["op"] = random.choice([other["op"], random.choice(_operators())])


def _edit_argument(plan: Json, random: Random) -> None:
    calls = _calls(plan)
    call, other = random.choice(calls), random.choice(calls)
    args = call.setdefault("args", [])
    kind = random.randrange(4)
    if kind == 0:
        args[random.randrange(len(args))] = random.choice(_ARGUMENTS)
    elif kind == 1:
        args.insert(random.randrange(len(args) + 1), random.choice(_ARGUMENTS))
    elif kind == 2:
        call["kwargs"] = {random.choice(["dim", "out", "dtype", "size", "x; y"]): 0}
    else:
        call["args"] = deepcopy(other.get("args", []))


def _edit_reference(plan: Json, random: Random) -> None:
    """Let a call take another value of its actor, or swap two calls."""
    actor = random.choice([actor for actor in _actors(plan) if actor.get("instructions")])
    calls = actor["instructions"]
    places = list(_references([call.get("args", []) for call in calls]))
    names = [place["ref"] for place in places] + [*actor.get("reads", ()), *actor["inputs"]]
    if random.random() < 0.3:
        one, other = random.randrange(len(calls)), random.randrange(len(calls))
        calls[one], calls[other] = calls[other], calls[one]
    else:
        random.choice(places)["ref"] = random.choice(names)


def _references(value: Any) -> Iterator[Json]:
    if isinstance(value, dict) and "ref" in value:
        yield value
    for part in value if isinstance(value, list) else ():
        yield from _references(part)


# Steps between ranks.


def _edit_step(plan: Json, random: Random) -> None:
    """Let a step do something else, mostly with the right number of bytes."""
    step = random.choice(plan["steps"])
    kind = random.randrange(6)
    if kind == 0:
        step["kind"] = random.choice(list(StepKind)).value
    elif kind == 1:
        step["source"], step["target"] = step["target"], step["source"]
    elif kind == 2:
        step["axes"] = random.choice([[], [0], [1], [0, 1], [1, 0]])
    elif kind == 3:
        step["dtype"] = random.choice(["float64", "int64", "bool", "complex64", "float16"])
    elif kind == 4:
        step.update(deepcopy(random.choice(plan["steps"])))
    else:
        end = random.choice([step["source"], step["target"]])
        entries = end[1].split(",")
        entries[random.randrange(len(entries))] = random.choice(_ENTRIES)
        end[1] = ", ".join(entries)
        step["kind"] = random.choice([step["kind"], random.choice(list(StepKind)).value])
    if random.random() < 0.9:
        made = load(step, BoxingStep)
        count = transfer_bytes if made.kind is StepKind.TRANSFER else collective_bytes
        step["size_bytes"] = count(made)


def _edit_use_of_step(plan: Json, random: Random) -> None:
    """Let an actor, on one rank or on all, or an instruction use another step."""
    number = random.randrange(len(plan["steps"]))
    boxes = [call for call in _calls(plan) if call["op"] == "sbp.local_box"]
    if boxes and random.random() < 0.5:
        random.choice(boxes)["args"][1] = number
        return
    actor = random.choice([actor for actor in _actors(plan) if "step" in actor])
    everywhere = random.random() < 0.7
    for other in _actors(plan):
        if other is actor or (everywhere and other["name"] == actor["name"]):
            other["step"] = number


# Actors, registers, orders.


def _actors(plan: Json) -> list[Json]:
    return [actor for part in plan["ranks"] for actor in part["actors"]]


def _edit_actor(plan: Json, random: Random) -> None:
    actor = random.choice(_actors(plan))
    other = random.choice(_actors(plan))
    key = random.choice(_PARTS_OF_ACTORS)
    if key in ("reads", "inputs", "outputs", "writes", "emits", "in_place", "accumulates"):
        entries = actor.setdefault(key, [])
        one = random.randrange(len(entries) + 1)
        way = random.randrange(4)
        if way == 0:
            entries.insert(one, random.choice(other.get(key) or other["inputs"]))
        elif way == 1:
            del entries[one]
        elif way == 2 and key in ("writes", "emits"):
            entries[one][1] = random.choice(entries)[1]
        elif key == "accumulates":
            entries[one][2] = random.choice([None, "maximum", "minimum", -1.0, 0.0, 1e300])
        else:
            actor["in_place"] = [state for state, _ in actor["writes"]]
    else:
        actor[key] = {
            "rate": "step" if actor["rate"] == "micro" else "micro",
            "begin_s": random.choice([None, 0.0, 1.0]),
            "stage": random.choice([0, 1]),
        }.get(key, other.get(key))


def _edit_register(plan: Json, random: Random) -> None:
    part = random.choice(plan["ranks"])
    register, other = random.choice(part["registers"]), random.choice(part["registers"])
    kind = random.randrange(6)
    if kind == 0:
        register["quota"] = random.choice([1, 2, 3, register["quota"] + 1, 1000])
    elif kind == 1:
        register["keys"] = random.choice([register["keys"][1:], other["keys"], []])
    elif kind == 2:
        register["consumers"] = random.choice([register["consumers"][1:], other["consumers"]])
    elif kind == 3:
        register["producer"] = other["producer"]
    elif kind == 4:
        register["rate"] = "step" if register["rate"] == "micro" else "micro"
    else:
        part["registers"].remove(register)


def _edit_order(plan: Json, random: Random) -> None:
    part = random.choice(plan["ranks"])
    name = random.choice(list(part["orders"]))
    order = part["orders"][name]
    one, other = random.randrange(len(order)), random.randrange(len(order))
    if random.random() < 0.7:
        order.insert(other, order.pop(one))
    else:
        # Move an actor to its own thread.
        moved = order[one][0]
        part["orders"][name] = [firing for firing in order if firing[0] != moved]
        part["orders"].setdefault("another", []).extend(f for f in order if f[0] == moved)
        next(actor for actor in part["actors"] if actor["name"] == moved)["thread"] = "another"


def _edit_overwriting(plan: Json, random: Random) -> None:
    """Let more states be overwritten, or let an actor read one without synchronisation."""
    kinds = [_overwrite, _look, _wait_less]
    for edit in random.sample(kinds, random.randint(1, len(kinds))):
        edit(plan, random)


def _overwrite(plan: Json, random: Random) -> None:
    """Let an actor, on one rank or on all, overwrite more of the states that it writes."""
    numbers = {s["name"] for part in plan["ranks"] for s in part["slots"] if s["sbp"] is None}
    actor = random.choice([actor for actor in _actors(plan) if actor.get("writes")])
    states = [state for state, _ in actor["writes"] if state not in numbers]
    chosen = random.sample(states, random.randint(1, len(states)))
    everywhere = random.random() < 0.7
    for other in _actors(plan):
        if other is actor or (everywhere and other["name"] == actor["name"]):
            other["in_place"] = list(dict.fromkeys([*other.get("in_place", []), *chosen]))
            if other["type"] == "Compute":
                other["reads"] = list(dict.fromkeys([*other.get("reads", []), *chosen]))


def _look(plan: Json, random: Random) -> None:
    """Let a new actor read a state: anywhere in the order of a thread, or on its own thread."""
    part = random.choice(plan["ranks"])
    state = random.choice([s for s in part["slots"] if s["kind"] == "parameter"])
    thread = random.choice([*part["orders"], "another"])
    found = {"op": "aten.neg.default", "args": [{"ref": state["name"]}], "outputs": ["seen"]}
    part["actors"].append({
        "type": "Compute", "name": "look", "stage": state["stage"], "phase": "optimizer",
        "rate": "step", "thread": thread, "reads": [state["name"]], "outputs": [],
        "emits": [["seen", "seen"]], "instructions": [found],
    })  # fmt: skip
    order = part["orders"].setdefault(thread, [])
    order.insert(random.randint(0, len(order)), ["look", 0])


def _wait_less(plan: Json, random: Random) -> None:
    """Remove registers that only signal that an actor has fired: one of a rank, or all."""
    part = random.choice(plan["ranks"])
    tokens = [register for register in part["registers"] if not register.get("keys")]
    gone = tokens if random.random() < 0.5 else [random.choice(tokens)]
    part["registers"] = [register for register in part["registers"] if register not in gone]


def _edit_link(plan: Json, random: Random) -> None:
    link, other = random.choice(plan["links"]), random.choice(plan["links"])
    kind = random.randrange(4)
    if kind == 0:
        plan["links"].remove(link)
    elif kind == 1:
        plan["links"].append({**link, "name": f"{link['name']} again"})
    elif kind == 2:
        link["quota"] = random.choice([0, 1, 2, 100])
    else:
        link["receiver"] = other["receiver"]


def _edit_slot(plan: Json, random: Random) -> None:
    """Let all ranks hold another part of a state or batch tensor, or change it on one rank."""
    slots = [slot for part in plan["ranks"] for slot in part["slots"]]
    slot = random.choice(slots)
    if random.random() < 0.3:
        key = random.choice(["kind", "dtype", "stage", "name"])
        slot[key] = random.choice(slots)[key]
        return
    stage = plan["stages"][slot["stage"]]
    mesh = load(stage, Placement)
    sbp = ", ".join(random.choice(_ENTRIES[:3]) for _ in range(mesh.num_axes))
    alike = [(part["rank"], s) for part, s in product(plan["ranks"], slots) if s in part["slots"]]
    for rank, other in alike:
        if other["name"] == slot["name"]:
            other["sbp"] = sbp
            at = mesh.coordinate(rank)
            held = local_shape(other["shape"], NdSbp.parse(sbp), mesh.mesh_shape, at)
            other["local_shape"] = list(held)


def _edit_whole(plan: Json, random: Random) -> None:
    kind = random.randrange(4)
    if kind == 0:
        plan["num_micro_batches"] = random.choice([1, 2, 3, 4])
    elif kind == 1:
        plan["ranks"].remove(random.choice(plan["ranks"]))
    elif kind == 2:
        one, other = random.choice(plan["ranks"]), random.choice(plan["ranks"])
        one["rank"], other["rank"] = other["rank"], one["rank"]
    else:
        one, other = random.choice(plan["ranks"]), random.choice(plan["ranks"])
        one.update({**deepcopy(other), "rank": one["rank"]})


_EDITS: Sequence[Callable[[Json, Random], None]] = (
    _edit_operator, _edit_argument, _edit_argument, _edit_reference, _edit_step, _edit_step,
    _edit_use_of_step, _edit_actor, _edit_actor, _edit_register, _edit_order, _edit_link,
    _edit_overwriting, _edit_overwriting, _edit_slot, _edit_whole,
)  # fmt: skip
