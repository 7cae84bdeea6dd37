"""Replay one step of a compiled plan, on tensors, on their memory, or on types alone.

The `domain` defines these values. A firing, one execution of an actor (a unit of work), takes
inputs, works, and puts results. This module owns the values between firings:

    producer  --put-->   register  [filling] [filling]  --take-->   consumers
    sender    --put-->   channel   [message] [message]  --take-->   receiver
    segment   --put-->   sum of an accumulation         --put-->    register, at the last firing

A filling (the values of one firing in a register) is kept until its last consumer has taken it, a
message until its last receiver has; the taker holds the value for its firing. States and batches
belong to the caller that starts the replay.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic

from sbp_core.compile.actors import Accumulate, Actor, ActorId, Collective, Compute, Receive, Send
from sbp_core.compile.physical import PhysicalPlan, Register
from sbp_core.compile.token_game import TokenGame
from sbp_core.interpreter.domain import Domain, Firing, V, Values, is_firing_of
from sbp_core.interpreter.firings import Firings


@dataclass(slots=True)
class _UnderWay(Generic[V]):
    """The inputs of boxing in progress; they live until a consumer waits for its result.

    Args:
        rank: The rank.
        taken: The inputs of its firing.
    """

    rank: int
    taken: Values[V]


@dataclass(slots=True)
class _Filling(Generic[V]):
    """One content of a register, until `takers` have taken it; the first awaits `under_way`."""

    values: Values[V]
    takers: int
    under_way: _UnderWay[V] | None = None


@dataclass(slots=True)
class _Message(Generic[V]):
    """A shard in transit from a rank, until `takers` have received it."""

    sender: int
    shard: V
    takers: int


class Interpreter(Generic[V]):
    """The replay of one step.

    Attributes:
        game: Data and credits, as counts.
        firings: The position of every thread.
        at: The current firing, or the last one.

    Args:
        plan: A plan with firing orders.
        domain: The domain of the values.
        states: By rank, the states by name.
        fed: By rank, for each micro-batch, its parts of the batch and scalars by name.
        stands_for: For each rank of a folded plan, the rank that represents it.
    """

    def __init__(
        self,
        plan: PhysicalPlan,
        domain: Domain[V],
        states: Mapping[int, Mapping[str, V]],
        fed: Mapping[int, Sequence[Mapping[str, V]]],
        stands_for: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.plan, self.domain, self.states, self.fed = plan, domain, states, fed
        self.game = TokenGame(plan, stands_for)
        self.firings = Firings(plan, self.game)
        self.at: Firing[Actor] | None = None
        #: The queue of fillings of each rank, register and consumer.
        self._fillings: dict[tuple[int, str, str], deque[_Filling[V]]] = defaultdict(deque)
        #: For each register, the queue of each consumer, and how often it takes a filling.
        self._takers: dict[tuple[int, str], list[tuple[deque[_Filling[V]], int]]] = {}
        self._in_transit: dict[str, deque[_Message[V]]] = defaultdict(deque)
        self._sums: dict[ActorId, Values[V]] = defaultdict(dict)
        self._under_way: dict[int, _UnderWay[V]] = {}
        self._alone: int | None = None
        for part in plan.ranks:
            for register in part.registers:
                pairs = list(zip(register.keys, register.carries, strict=bool(register.carries)))
                held = {key: states[part.rank][state] for key, state in pairs}
                for _ in range(min(register.initial, plan.repetitions[register.rate])):
                    self._fill(part.rank, register, held)

    def run(self) -> bool:
        """Replay the step; return whether all threads came to their end."""
        came = self.firings.run(self._fire, self.domain.duration)
        self._end_all()
        return came

    def run_rank(self, rank: int, events: Iterable[ActorId]) -> None:
        """Replay one rank by itself, in a known order; counts are not kept.

        Only for domains in which the result of boxing on a rank follows from its own shard. Then it
        needs no messages of other ranks, and its own messages are held until received.

        Args:
            rank: The rank.
            events: Firings of its actors, and other ranks' receives of its messages.
        """
        self._alone = rank
        part, fired = self.plan.by_rank[rank], defaultdict[str, int](int)
        for other, name in events:
            if other != rank:
                for message in self._arrived((other, name)):
                    self._take_message(message)
                continue
            self._fire_together([Firing(rank, part.by_name[name], fired[name])])
            fired[name] += 1
        self._end_all()

    def _fire(self, actor_id: ActorId) -> None:
        """Fire an actor; a collective on all ranks of its group at once."""
        firings: list[Firing[Actor]] = [
            Firing(rank, self.game.actor((rank, name)), self.game.start((rank, name)))
            for rank, name in self.game.partners(actor_id)
        ]
        self._fire_together(firings)
        for firing in firings:
            # Counts follow values: credits are given back after the inputs are dropped.
            self.game.finish(firing.id)
            self.firings.advance(firing.id)
            self.domain.fired(firing, self.game)

    def _fire_together(self, firings: Sequence[Firing[Actor]]) -> None:
        """Execute firings together: take, work, put."""
        self.at = firings[0]
        # All take before any of them works: a collective needs the shards of the whole group.
        taken = [self._take(firing) for firing in firings]
        collective = [firing for firing in firings if is_firing_of(firing, Collective)]
        if collective:
            made = self._collective(collective, taken)
        else:
            made = [self._work(firings[0], taken[0])]
        for firing, values, given in zip(firings, made, taken, strict=True):
            under_way: _UnderWay[V] | None = None
            # Inputs of boxing in progress are kept; inputs of finished boxing are dropped.
            if firing.actor.overlaps:
                under_way = _UnderWay(firing.rank, given)
                self._under_way[id(under_way)] = under_way
            elif isinstance(firing.actor, Collective):
                self._drop(firing.rank, given)
            if values is not None:
                self._put(firing, values, under_way)

    # Taking and putting.

    def _take(self, firing: Firing[Actor]) -> Values[V]:
        """Return the inputs of an actor: register contents, states, parts of the batch, scalars.

        Each value is held once, for the firing.
        """
        rank, name, domain = firing.rank, firing.actor.name, self.domain
        values: Values[V] = {}
        for register in self.plan.by_rank[rank].inputs_of[name]:
            filling = self._fillings[rank, register.name, name].popleft()
            if filling.under_way is not None:
                self._end(filling.under_way)
            # Carried states come under their own names, as in the first micro-batch.
            names = register.carries or register.keys
            values |= zip(names, filling.values.values(), strict=True)
            # Held before the register drops it: a value without a holder is freed.
            for value in filling.values.values():
                domain.hold(rank, value)
            filling.takers -= 1
            if not filling.takers:
                for value in filling.values.values():
                    domain.drop(rank, value)
        states = self.states[rank]
        for key in firing.actor.reads:
            if key not in values:  # else it was carried here from the previous micro-batch
                values[key] = states[key] if key in states else self.fed[rank][firing.index][key]
                domain.hold(rank, values[key])
        return values

    def _end(self, begun: _UnderWay[V]) -> None:
        """Drop the inputs of a boxing step once a consumer waits for its result."""
        if self._under_way.pop(id(begun), None) is not None:
            self._drop(begun.rank, begun.taken)

    def _end_all(self) -> None:
        """Wait at the end of the step for boxing without a waiting consumer, such as of results."""
        for begun in list(self._under_way.values()):
            self._end(begun)

    def _put(self, firing: Firing[Actor], made: Values[V], under_way: _UnderWay[V] | None) -> None:
        """Fill registers, pass on results and new states, drop the firing's values."""
        rank, actor, domain = firing.rank, firing.actor, self.domain
        for register in self.plan.by_rank[rank].outputs_of[actor.name]:
            # A value that is carried beyond the step is the state at the begin of the next step; a
            # register that needs several firings is filled by the last one.
            firings = self.plan.firings_per_filling(actor, register)
            filling, is_open = divmod(firing.index + 1, firings)
            left = self.plan.repetitions[register.rate] - filling
            if not is_open and left >= register.initial:
                held = {key: made[key] for key in register.keys}
                self._fill(rank, register, held, under_way)
        # Registers first, then results and states; the firing drops its results last, so that a
        # kept value always has a holder.
        for result, key in actor.emits:
            domain.emit(firing, result, made[key])
        for state, key in actor.writes:
            domain.write(firing, state, made[key])
        for key in made:
            domain.drop(rank, made[key])

    def _fill(
        self,
        rank: int,
        register: Register,
        values: Values[V],
        under_way: _UnderWay[V] | None = None,
    ) -> None:
        takers = self._takers.get((rank, register.name))
        if takers is None:
            part, plan = self.plan.by_rank[rank], self.plan
            takers = self._takers[rank, register.name] = [
                (
                    self._fillings[rank, register.name, name],
                    plan.firings_per_filling(part.by_name[name], register),
                )
                for name in register.consumers
            ]
        filling = _Filling(values, sum(count for _, count in takers), under_way)
        for value in values.values():
            self.domain.keep(rank, value)
        for fillings, count in takers:
            for _ in range(count):
                fillings.append(filling)

    # The work of a firing. Results are held once; inputs are dropped.

    def _work(self, firing: Firing[Actor], taken: Values[V]) -> Values[V] | None:
        """Return the results of an actor; None of an accumulation that is not finished."""
        if is_firing_of(firing, Compute):
            return self.domain.compute(firing, taken)
        if is_firing_of(firing, Accumulate):
            return self._accumulate(firing, taken)
        if is_firing_of(firing, Send):
            self._send(firing, taken)
            return {}
        assert is_firing_of(firing, Receive), "a collective fires on all ranks of its group at once"
        return {firing.actor.makes: self._receive(firing, taken)}

    def _collective(
        self, firings: Sequence[Firing[Collective]], taken: Sequence[Values[V]]
    ) -> list[Values[V] | None]:
        shards = {firing.rank: _only(values) for firing, values in zip(firings, taken, strict=True)}
        parts = self.domain.collective(firings, shards)
        made: list[Values[V] | None] = []
        for firing in firings:
            self.domain.hold(firing.rank, parts[firing.rank])
            made.append({firing.actor.makes: parts[firing.rank]})
        return made

    def _send(self, firing: Firing[Send], taken: Values[V]) -> None:
        """Put a shard onto the channels to all receivers."""
        self.domain.send(firing, _only(taken))
        channels = self.game.sends[firing.id]
        if channels:
            # One message on all channels, held by the sender's rank until the last receiver has it.
            message = _Message(firing.rank, _only(taken), len(channels))
            self.domain.keep(firing.rank, message.shard)
            for channel in channels:
                self._in_transit[channel.name].append(message)
        self._drop(firing.rank, taken)

    def _receive(self, firing: Firing[Receive], taken: Values[V]) -> V:
        """Take the messages of all senders; its own shard comes by a channel, too."""
        messages = self._arrived(firing.id)
        part = self.domain.receive(firing, {message.sender: message.shard for message in messages})
        self.domain.hold(firing.rank, part)
        for message in messages:
            self._take_message(message)
        self._drop(firing.rank, taken)
        return part

    def _arrived(self, receiver: ActorId) -> list[_Message[V]]:
        """Return the messages for a receive, one of each sender that is replayed."""
        return [
            self._in_transit[channel.name].popleft()
            for channel in self.game.receives[receiver]
            if self._alone in (None, channel.sender[0])
        ]

    def _take_message(self, message: _Message[V]) -> None:
        message.takers -= 1
        if not message.takers:
            self.domain.drop(message.sender, message.shard)

    def _accumulate(self, firing: Firing[Accumulate], taken: Values[V]) -> Values[V] | None:
        """Add a micro-batch to the sums; pass them on in the last one.

        No variable of this frame may refer to a part while the next one is added: see
        `InstructionDomain.compute`.
        """
        rank, domain, sums = firing.rank, self.domain, self._sums[firing.id]
        terms = firing.actor.accumulates
        last_use = {part: number for number, (part, _, _) in enumerate(terms)}
        for number, term in enumerate(terms):
            part, total, _ = term
            new = domain.add(firing, term, sums.get(total), taken[part])
            domain.keep(rank, new)
            if total in sums:
                domain.drop(rank, sums[total])
            sums[total] = new
            del new
            if last_use[part] == number:
                domain.drop(rank, taken.pop(part))
        repeats = self.plan.repetitions
        if (firing.index + 1) % (repeats[firing.actor.rate] // repeats[firing.actor.fills]):
            return None
        return self._sums.pop(firing.id)

    def _drop(self, rank: int, values: Values[V]) -> None:
        for key in list(values):
            self.domain.drop(rank, values.pop(key))


def _only(values: Values[V]) -> V:
    (value,) = values.values()
    return value
