"""`PhysicalPlan`: a compiled step: actors (units of work), registers and threads of every rank.

A plan is a synchronous-dataflow graph that holds everything a runtime needs and nothing else. It is
serialisable and hashable; runtimes execute it and `sbp_core.check` replays it.

Keys name what a rank holds: `x` is a value as its op makes it, `x@1(S(0), B)` the same logical
value boxed to stage 1 and that nd-SBP. Actors read graph inputs (states, batch, scalars) by name
and each other's results through registers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from sbp_core.boxing.step import BoxingStep
from sbp_core.compile.actors import Actor, ActorId, Collective, Compute, Instruction, Receive
from sbp_core.graph.ir import Argument, InputKind, Rate, TensorType, repetitions
from sbp_core.graph.primitives import LOCAL_BOX
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.serialize import Document, Lines, load


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Holds results of one actor for the same consumers.

    Args:
        name: Unique on its rank.
        producer: Actor that fills it.
        consumers: Actors that read it; each gives its credit back after its firing.
        keys: The values in it; none if the register only signals that its producer has fired.
        rate: How often it is filled: less often than its producer fires if it holds the sums of an
            accumulation, or signals the last firing of the step. Only a register that carries
            states may be read more often than filled: each filling several times.
        quota: How many fillings may be alive at once.
        carries: If the register passes states from each micro-batch or update to the next, the
            names of the states, one for each key; else empty. Its consumers read them as states. It
            is full when a step begins, with the states themselves, and when it ends, with the new
            values.
        staleness: If it carries states: by how many updates the values that a consumer takes are
            older than the newest ones, except in the first micro-batches of a step.
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    keys: tuple[str, ...]
    rate: Rate
    quota: int
    carries: tuple[str, ...] = ()
    staleness: int = 0

    @property
    def initial(self) -> int:
        """How many fillings there are when a step begins; the states themselves are in each."""
        return 1 + self.staleness if self.carries else 0


def token(producer: str, *consumers: str, rate: Rate = Rate.STEP, quota: int = 1) -> Register:
    """Return a register without values, by which actors wait for another actor."""
    return Register(
        name=f"{producer}>{consumers[0]}",
        producer=producer,
        consumers=consumers,
        keys=(),
        rate=rate,
        quota=quota,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A register between ranks: messages that were sent and that the receiver has not yet taken."""

    name: str
    sender: ActorId
    receiver: ActorId
    quota: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSlot:
    """A state, batch tensor or scalar that a rank holds.

    Args:
        name: Name of the graph input.
        kind: Kind of the graph input.
        shape, dtype: Of the logical tensor; a host scalar has an empty shape.
        sbp: The nd-SBP on the placement of its stage; None for host scalars.
        local_shape: Shape of this rank's part.
        offloaded: Whether that part is in host memory, where actors of transfer threads fetch and
            store it (`offload`).
    """

    name: str
    kind: InputKind
    shape: tuple[int, ...]
    dtype: str
    stage: int
    sbp: NdSbp | None
    local_shape: tuple[int, ...]
    offloaded: bool = False

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's part; 0 for a host scalar."""
        return 0 if self.sbp is None else TensorType(self.local_shape, self.dtype).size_bytes


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """Everything one rank does in a step."""

    rank: int
    slots: tuple[StateSlot, ...]
    actors: tuple[Actor, ...]
    registers: tuple[Register, ...]
    orders: Mapping[str, tuple[tuple[str, int], ...]]

    @cached_property
    def by_name(self) -> Mapping[str, Actor]:
        """Each actor by name."""
        return {actor.name: actor for actor in self.actors}

    @cached_property
    def inputs_of(self) -> Mapping[str, tuple[Register, ...]]:
        """For each actor the registers it reads."""
        found: dict[str, list[Register]] = {actor.name: [] for actor in self.actors}
        for register in self.registers:
            for name in dict.fromkeys(register.consumers):
                found.setdefault(name, []).append(register)
        return {name: tuple(registers) for name, registers in found.items()}

    @cached_property
    def outputs_of(self) -> Mapping[str, tuple[Register, ...]]:
        """For each actor the registers it fills."""
        found: dict[str, list[Register]] = {actor.name: [] for actor in self.actors}
        for register in self.registers:
            found.setdefault(register.producer, []).append(register)
        return {name: tuple(registers) for name, registers in found.items()}


@dataclass(frozen=True, kw_only=True)
class PhysicalPlan:
    """The actors of all ranks for one step, and the strategy that they were compiled from.

    `ties` maps a host state, such as a step counter, to the states of the model that it stands for.
    """

    graph_hash: str
    planner: str
    num_micro_batches: int
    num_updates: int = 1
    ties: Mapping[str, tuple[str, ...]]
    stages: tuple[Placement, ...]
    steps: tuple[BoxingStep, ...]
    links: tuple[Channel, ...]
    ranks: tuple[RankPlan, ...]

    @cached_property
    def repetitions(self) -> Mapping[Rate, int]:
        """How often actors and registers of each rate fire, or are filled, in one step."""
        return repetitions(self.num_micro_batches, self.num_updates)

    def firings_per_filling(self, actor: Actor, register: Register) -> int:
        """Return how many firings of its producer a filling takes, or of a consumer it serves."""
        return self._per_filling[actor.rate, register.rate]

    @cached_property
    def _per_filling(self) -> Mapping[tuple[Rate, Rate], int]:
        times = self.repetitions
        return {(fires, filled): times[fires] // times[filled] for fires in Rate for filled in Rate}

    @cached_property
    def by_rank(self) -> Mapping[int, RankPlan]:
        """Each rank's plan by rank."""
        return {part.rank: part for part in self.ranks}

    @property
    def distinct(self) -> list[RankPlan]:
        """One rank of each class that shares slots, actors and registers: the last of the class.

        Properties of these objects alone are checked once, however many ranks there are.
        """
        found = {
            (id(part.slots), id(part.actors), id(part.registers)): part
            for part in reversed(self.ranks)
        }
        return list(reversed(found.values()))

    @cached_property
    def alike(self) -> Mapping[int, int]:
        """For each rank the first one with equal slots, actors, registers and orders."""
        ranks = self.ranks
        # Instructions are not hashable; ranks with equal names and times of actors are compared.
        numbers = zip(
            _numbered([part.slots for part in ranks], lambda value: value),
            _numbered([p.actors for p in ranks], lambda v: tuple((a.name, a.time_s) for a in v)),
            _numbered([part.registers for part in ranks], lambda value: value),
            _numbered([part.orders for part in ranks], lambda value: frozenset(value.items())),
            strict=True,
        )
        first: dict[tuple[int, ...], int] = {}
        pairs = zip(ranks, numbers, strict=True)
        return {part.rank: first.setdefault(number, part.rank) for part, number in pairs}

    @cached_property
    def alike_but_for_numbers(self) -> Mapping[int, int]:
        """Like `alike`, but ignoring the numbers among arguments, such as where a shard begins."""
        few = [part for part in self.ranks if self.alike[part.rank] == part.rank]
        known: dict[int, Instruction] = {}
        formed = replace(
            self,
            ranks=tuple(
                replace(part, actors=tuple(_without_numbers(a, known) for a in part.actors))
                for part in few
            ),
        )
        return {rank: formed.alike[first] for rank, first in self.alike.items()}

    @cached_property
    def hash(self) -> str:
        """16 hex digits of everything in the plan."""
        text = json.dumps(PLAN.dump(self), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @cached_property
    def staleness(self) -> Mapping[str, int]:
        """By how many updates the parameters of a micro-batch are stale; only values > 0."""
        return {
            state: register.staleness
            for part in self.ranks
            for register in part.registers
            if register.staleness
            for state in register.carries
        }

    @property
    def boxing_bytes(self) -> int:
        """Bytes that one step moves between ranks, summed over ranks and steps."""
        moves = {
            actor.step: actor.num_firings(self.repetitions)
            for part in self.distinct
            for actor in part.actors
            if isinstance(actor, Collective | Receive)
        }
        return sum(self.steps[index].size_bytes * count for index, count in moves.items())


_T = TypeVar("_T")


def _numbered(values: list[_T], sketch: Callable[[_T], Hashable]) -> list[int]:
    """Return a number for each value, the same for equal ones; each object is compared once.

    Args:
        values: The values, kept alive by the caller.
        sketch: Maps a value to something hashable that is the same for equal values.
    """
    by_id: dict[int, int] = {}
    alike: dict[Hashable, list[tuple[_T, int]]] = defaultdict(list)
    for value in values:
        if id(value) not in by_id:
            same = alike[sketch(value)]
            number = next((n for other, n in same if other == value), None)
            if number is None:
                number = len(by_id)
                same.append((value, number))
            by_id[id(value)] = number
    return [by_id[id(value)] for value in values]


def _without_numbers(actor: Actor, known: dict[int, Instruction]) -> Actor:
    """Return an actor with types in place of numbers; `known` are instructions by id."""
    if not isinstance(actor, Compute):
        return actor
    for entry in actor.instructions:
        if id(entry) not in known:
            args = tuple(map(_type_of_number, entry.args))
            kwargs = {key: _type_of_number(value) for key, value in entry.kwargs.items()}
            # In a local boxing step the number selects the step.
            is_local = entry.op == LOCAL_BOX
            known[id(entry)] = entry if is_local else replace(entry, args=args, kwargs=kwargs)
    return replace(actor, instructions=tuple(known[id(one)] for one in actor.instructions))


def _type_of_number(argument: Argument) -> Argument:
    """Return the name of a number's type in its place; 1, 1.0 and True are equal otherwise."""
    if isinstance(argument, tuple | list):
        return tuple(map(_type_of_number, argument))
    return type(argument).__name__ if isinstance(argument, int | float) else argument


#: A rank as a key of JSON: one text for each.
_RANK = re.compile("0|[1-9][0-9]{0,8}")

_LIKE: Any = Mapping[str, Mapping[str, int]]


class _PlanDocument(Document[PhysicalPlan]):
    """The file of a plan, in which equal ranks are written once.

        "ranks": [{"rank": 0, "slots": ...}, ...]
        "like":  {"1": 0, "2": 0, ...}             ranks that are equal to another rank

    A file that lists every rank separately means the same, and can be read, too.
    """

    def dump(self, value: PhysicalPlan) -> dict[str, Any]:
        """See `Document.dump`."""
        alike = value.alike
        few = tuple(part for part in value.ranks if alike[part.rank] == part.rank)
        like = {str(rank): first for rank, first in alike.items() if rank != first}
        return {**super().dump(replace(value, ranks=few)), "like": like}

    def load(self, value: object, where: str | Lines = "") -> PhysicalPlan:
        """See `Document.load`."""
        if not isinstance(value, dict) or "like" not in value:
            return super().load(value, where)
        plan = super().load({key: part for key, part in value.items() if key != "like"}, where)
        found: Mapping[str, Mapping[str, int]] = load(
            {"like": value["like"]}, _LIKE, where=where, error=self.error, todo=self.todo
        )
        ranks = [*plan.ranks]
        for rank, first in found["like"].items():
            if not _RANK.fullmatch(rank) or int(rank) in plan.by_rank or first not in plan.by_rank:
                raise self.error(
                    f"rank {rank!r} is listed as like rank {first}",
                    where=where if isinstance(where, str) else where.where(["like", rank]),
                    accepted="a rank that is not listed, like one that is",
                    todo=self.todo,
                )
            ranks.append(replace(plan.by_rank[first], rank=int(rank)))
        return replace(plan, ranks=tuple(sorted(ranks, key=lambda part: part.rank)))


#: The file of a plan.
PLAN = _PlanDocument(
    kind=PhysicalPlan,
    format="sbp-plan",
    version=3,
    todo="compile again with this version",
    most_bytes=2**30,
)
