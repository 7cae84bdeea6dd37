"""`Actor`: a unit of work of a rank in a compiled plan: computing, sending, summing and so on.

The compiler (`segments`) makes actors; runtimes and the checker (`sbp_core.check`) execute them.

Compute      operator calls without boxing between ranks among them
Collective   a rank's part in a boxing step of one mesh
Send         the sending end of a transfer between meshes
Receive      the receiving end
Accumulate   sums over micro-batches
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from sbp_core.graph.ir import Argument, Phase, Rate, refs

#: An actor of any rank: its rank, and its name there.
ActorId = tuple[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One operator call of a compute segment, on local tensors; `Ref`s name keys or inputs."""

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    outputs: tuple[str, ...]
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Actor:
    """The fields that every kind of actor has.

    Args:
        name: Unique on its rank; a collective has the same name on every rank of its group.
        stage: The stage it belongs to.
        phase, rate: When it fires: for each micro-batch, or once a step.
        thread: Name of its thread on this rank.
        inputs: Keys it takes from registers.
        reads: Graph inputs it reads: states, batch tensors, scalars.
        time_s: Predicted time of one firing, in seconds, by `sbp_core.cost`.
    """

    name: str
    stage: int
    phase: Phase
    rate: Rate
    thread: str
    inputs: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    time_s: float = 0.0

    @property
    def outputs(self) -> tuple[str, ...]:
        """Keys it puts into registers."""
        return ()

    @property
    def emits(self) -> tuple[tuple[str, str], ...]:
        """Losses and metrics that this actor returns from the step, with their keys."""
        return ()

    @property
    def writes(self) -> tuple[tuple[str, str], ...]:
        """States whose new values this actor makes, with their keys."""
        return ()

    @property
    def in_place(self) -> tuple[str, ...]:
        """States among `writes` that are overwritten."""
        return ()

    @property
    def fill_rate(self) -> Rate:
        """How often it fills its registers."""
        return self.rate

    @property
    def overlaps(self) -> bool:
        """Whether its thread continues while data moves."""
        return False

    @property
    def busy_s(self) -> float:
        """How much of `time_s` its thread is busy, in seconds."""
        return self.time_s

    def num_firings(self, repetitions: Mapping[Rate, int]) -> int:
        """Return how often it fires in one step."""
        return repetitions[self.rate]

    @property
    def begun_s(self) -> float:
        """How long after the start of the firing data begins to move, in seconds."""
        return self.busy_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker(_Actor):
    """An actor that makes values.

    Args:
        outputs: Keys it puts into registers.
        emits: (result name, key): losses and metrics that it returns from the step.
        writes: (state, key): new values of states, in force from the next step on; of an actor that
            fires for each micro-batch, the value of its last firing.
        in_place: States among `writes` whose new value goes into the memory of the old one: a
            segment computes or copies it there, other actors have it copied after the firing.
    """

    outputs: tuple[str, ...] = ()
    emits: tuple[tuple[str, str], ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    in_place: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(_Maker):
    """A compute segment: operator calls on one rank, without boxing between ranks among them.

    Args:
        instructions: The calls, in order.
        donated: Keys among `inputs` that it may write over: copies of offloaded states that no
            other actor takes.
    """

    instructions: tuple[Instruction, ...]
    donated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(_Maker):
    """A rank's part in a boxing step of one mesh, which fires on all ranks of its group at once.

    It fires on one thread. If it `overlaps`, its firing only begins the step: the thread continues,
    and the first actor that takes the result waits until it is there.

    Args:
        step: Index into `plan.steps`.
        makes: The key of its result, whether or not an actor of this rank takes it.
        begin_s: The part of `time_s` in which its thread is busy to begin; None if the thread
            waits.
        drag_s: The part of the rest in which its thread cannot compute, because the transport needs
            its core.
    """

    step: int
    makes: str
    begin_s: float | None = None
    drag_s: float = 0.0

    @property
    def overlaps(self) -> bool:
        """See `_Actor.overlaps`."""
        return self.begin_s is not None

    @property
    def busy_s(self) -> float:
        """See `_Actor.busy_s`."""
        return self.time_s if self.begin_s is None else self.begin_s + self.drag_s

    @property
    def begun_s(self) -> float:
        """See `_Actor.begun_s`."""
        return self.time_s if self.begin_s is None else self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(_Actor):
    """The sending end of a transfer: puts a shard onto the channels to its receivers.

    Args:
        step: Index into `plan.steps`.
    """

    step: int

    @property
    def message(self) -> str:
        """The name of the message, the same on both ends."""
        return self.name.removeprefix("send ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive(_Maker):
    """The receiving end of a transfer: makes its shard from the senders' messages.

    Args:
        step: Index into `plan.steps`.
        makes: The key of its result, whether or not an actor of this rank takes it.
    """

    step: int
    makes: str

    @property
    def message(self) -> str:
        """The name of the message, the same on both ends."""
        return self.name.removeprefix("receive ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulate(_Maker):
    """Sums over micro-batches, put into registers by the firing of the last one.

    Args:
        fills: How often it puts them there: for each update, or once a step.
        accumulates: (part, sum, how) for each value. `how` is the factor of the parts in their sum;
            "maximum" or "minimum"; "stack" to keep all parts; or None for the last micro-batch's.
    """

    fills: Rate = Rate.STEP
    accumulates: tuple[tuple[str, str, float | str | None], ...]

    @property
    def fill_rate(self) -> Rate:
        """How often it fills its registers."""
        return self.fills


#: One kind of work on one thread of one rank.
Actor: TypeAlias = Compute | Collective | Send | Receive | Accumulate

#: An actor that takes part in a boxing step.
BoxingActor: TypeAlias = Collective | Send | Receive


# When values die inside a segment: generated code, runtimes and memory prediction agree on this.


def keys_out(actor: Actor) -> tuple[str, ...]:
    """Return the keys that leave a segment: for registers, as results and as new states."""
    leaving = (key for _, key in (*actor.emits, *actor.writes))
    return tuple(dict.fromkeys((*actor.outputs, *leaving)))


def keys_in(entry: Instruction) -> tuple[str, ...]:
    """Return the keys that an instruction takes, in the order of its arguments, each once."""
    found = refs((entry.args, tuple(entry.kwargs.values())))
    return tuple(dict.fromkeys(ref.name for ref in found))


def dying_keys(actor: Compute) -> tuple[tuple[str, ...], ...]:
    """Return for each instruction of a segment the keys that are not used after it.

    Unused results die with the instruction that makes them.
    """
    returned = set(keys_out(actor))
    last: dict[str, int] = {}
    for index, entry in enumerate(actor.instructions):
        for key in (*keys_in(entry), *entry.outputs):
            last[key] = index
    dying: list[list[str]] = [[] for _ in actor.instructions]
    for key, index in last.items():
        if key not in returned:
            dying[index].append(key)
    return tuple(map(tuple, dying))
