"""When each storage of each rank is made and dropped, over one step of a plan.

The step is replayed in the plan's firing orders, as runtimes do it, with counts of holders instead
of tensors:

* An instruction's results coexist with its arguments; a value dies after the instruction that uses
  it last, unless it leaves its segment. Views keep the storage that they look at.
* A filling of a register holds its values until the last consumer has taken it; who took it drops
  each value after its last use.
* What was sent is held until every receiver has it. A received part counts on the receiver alone,
  with the bytes that it shows, whether or not a transport shares memory.
* Old states live to the end of the step, beside the new ones: a step that fails leaves them. New
  values that are copied over the old ones (`Actor.in_place`) die like any other value.

Time is counted in ticks: one for each instruction or boxing step of a rank. Between threads it is
one of the possible interleavings, in which every instruction takes equally long: when a receiver
takes what was sent, and so how long a sender holds it, is a matter of time in a run, too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sbp_core.boxing.slices import bounds_of, collective_pieces, transfer_pieces
from sbp_core.boxing.step import Step, StepKind
from sbp_core.compile.firings import Firings
from sbp_core.compile.liveness import dying_keys, keys_in, keys_out
from sbp_core.compile.physical import Actor, ActorKind, Instruction, PhysicalPlan, RankPlan
from sbp_core.compile.token_game import ActorId, TokenGame
from sbp_core.errors import PlanError
from sbp_core.graph.ir import InputKind, Ref
from sbp_core.memory.kinds import (
    kind_of_slot,
    kinds_of_keys,
    module_of_node,
    module_of_slot,
)
from sbp_core.memory.ledger import Buffer, Ledger
from sbp_core.memory.storage_view import Number, ResultLayout, StorageView, Strided, contiguous

Value = StorageView | Number
Values = dict[str, Value]


class CallLayouts(Protocol):
    """Knows how the results of instructions lie: `memory.layout.Layouts`."""

    def call(
        self, entry: Instruction, rank: int, read: Callable[[str], Value]
    ) -> tuple[ResultLayout | Number, ...]:
        """Return how each output lies."""


class LayoutLibrary(Protocol):
    """Of a plugin of kind `tensor_library`: knows how results of operators lie in memory."""

    def call_layouts(self, steps: Sequence[Step]) -> CallLayouts:
        """Return what knows the layouts of one plan.

        Args:
            steps: Its boxing steps, which instructions name by index.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLifetimes:
    """The storages of one rank over a step.

    Args:
        rank: Whose.
        buffers: In the order in which they are made.
        ticks: For each tick, the actor, the index of its firing, and the node it is in.
    """

    rank: int
    buffers: tuple[Buffer, ...]
    ticks: tuple[tuple[str, int, str], ...]


def lifetimes(plan: PhysicalPlan, layouts: CallLayouts) -> dict[int, RankLifetimes]:
    """Return the lifetimes of all storages, by rank, in a step that follows another.

    Args:
        plan: With firing orders that `sbp_core.check` accepts.
        layouts: Says how results lie.

    Raises:
        PlanError: the orders come to a stand, or the layout of a result is not known.
    """
    first = _Replay(plan, layouts, {})
    first.run()
    # New states may lie otherwise than the first ones, such as column by column.
    changed = first.moved_states()
    if not changed:
        return first.found()
    second = _Replay(plan, layouts, changed)
    second.run()
    return second.found()


@dataclass(slots=True)
class _Filling:
    """What a register holds once, until `takers` have taken it."""

    values: Values
    takers: int


@dataclass(slots=True)
class _Letter:
    """A shard that was sent, until `takers` have received it."""

    value: Value
    takers: int


@dataclass(slots=True)
class _Rank:
    """What one rank holds besides registers."""

    part: RankPlan
    ledger: Ledger
    states: Values = field(default_factory=dict)
    fed: list[Values] = field(default_factory=list)
    writes: Values = field(default_factory=dict)
    emits: Values = field(default_factory=dict)
    sums: Values = field(default_factory=dict)
    ticks: list[tuple[str, int, str]] = field(default_factory=list)

    def tick(self, actor: Actor, index: int, node: str) -> None:
        """Go on to an instruction or boxing step."""
        self.ledger.tick()
        self.ticks.append((actor.name, index, node))

    def keep(self, where: Values, name: str, value: Value) -> None:
        """Put a value in place of the one before."""
        self.ledger.hold(value)
        if name in where:
            self.ledger.drop(where[name])
        where[name] = value


class _Replay:
    """One step: the token game with storages."""

    def __init__(
        self,
        plan: PhysicalPlan,
        layouts: CallLayouts,
        state_lies: Mapping[tuple[int, str], StorageView],
    ) -> None:
        self.plan, self.layouts = plan, layouts
        self.game = TokenGame(plan)
        self.queues: dict[tuple[int, str, str], deque[_Filling]] = defaultdict(deque)
        self.letters: dict[str, deque[_Letter]] = defaultdict(deque)
        self.dying: dict[ActorId, tuple[tuple[str, ...], ...]] = {}
        self.ranks = {part.rank: self._rank(part, state_lies) for part in plan.ranks}
        self.firings = Firings(plan, self.game)

    def _rank(self, part: RankPlan, state_lies: Mapping[tuple[int, str], StorageView]) -> _Rank:
        """Return a rank as it begins a step: states, parts of the batch, scalars."""
        ledger = Ledger(kinds_of_keys(self.plan, part))
        rank = _Rank(part, ledger, fed=[{} for _ in range(self.plan.num_micro_batches)])
        shared: dict[int, StorageView] = {}
        for slot in part.slots:
            kind = InputKind(slot.kind)
            homes = [rank.states] if kind.is_state else rank.fed
            for home in homes:
                if slot.sbp is None:
                    home[slot.name] = 1 if slot.dtype.startswith(("int", "bool")) else 1.0
                    continue
                lies = contiguous(slot.local_shape, slot.dtype)
                moved = state_lies.get(
                    (part.rank, slot.name), StorageView(lies, -1, lies.size_bytes)
                )
                if moved.storage in shared:
                    home[slot.name] = replace(shared[moved.storage], lies=moved.lies)
                else:
                    made = home[slot.name] = ledger.new(
                        slot.name,
                        moved.lies,
                        moved.storage_bytes,
                        kind=kind_of_slot(slot.kind),
                        module=module_of_slot(slot.name, slot.kind),
                    )
                    if moved.storage >= 0:
                        shared[moved.storage] = made
                ledger.hold(home[slot.name])
        for register in part.registers:
            if register.carries:
                self._fill(rank, register.name, register.consumers, {
                    key: rank.states[state]
                    for state, key in zip(register.carries, register.keys, strict=True)
                })  # fmt: skip
        rank.ticks.append(("", 0, ""))
        return rank

    def run(self) -> None:
        if not self.firings.run(self._fire, self._lasts):
            raise PlanError("the firing orders come to a stand", todo="check the plan first")
        for rank in self.ranks.values():
            rank.ledger.finish()

    def _lasts(self, place: ActorId) -> int:
        """Return for how many instructions a firing keeps its thread."""
        return 1 + len(self.game.actor(place).instructions)

    def _fire(self, place: ActorId) -> None:
        for partner in self.game.partners(place):
            rank, actor = self.ranks[partner[0]], self.game.actor(partner)
            index = self.game.start(partner)
            taken = self._take(rank, actor, index)
            made = self._run(rank, actor, index, taken)
            self._put(rank, actor, index, made)
            self.game.finish(partner)
            self.firings.advance(partner)

    def found(self) -> dict[int, RankLifetimes]:
        return {
            name: RankLifetimes(
                rank=name,
                buffers=tuple(rank.ledger.buffers),
                ticks=tuple(rank.ticks),
            )
            for name, rank in self.ranks.items()
        }

    def moved_states(self) -> dict[tuple[int, str], StorageView]:
        """Return the new states that lie otherwise than the old ones: how, and in which storage.

        Several may lie in one, such as parameters that were gathered together.
        """
        return {
            (name, state): value
            for name, rank in self.ranks.items()
            for state, value in rank.writes.items()
            if isinstance(value, StorageView)
            and isinstance(old := rank.states[state], StorageView)
            and (value.lies, value.storage_bytes) != (old.lies, old.storage_bytes)
        }

    # Taking and putting.

    def _take(self, rank: _Rank, actor: Actor, index: int) -> Values:
        """Return what an actor reads, held once for its firing."""
        values: Values = {}
        for register in rank.part.inputs_of[actor.name]:
            filling = self.queues[(rank.part.rank, register.name, actor.name)].popleft()
            names = register.carries or register.keys
            found = dict(zip(names, filling.values.values(), strict=True))
            values |= found
            for value in found.values():
                rank.ledger.hold(value)
            filling.takers -= 1
            if not filling.takers:
                for value in found.values():
                    rank.ledger.drop(value)
        for key in actor.reads:
            if key not in values:
                held = rank.states
                values[key] = held[key] if key in held else rank.fed[index][key]
                rank.ledger.hold(values[key])
        return values

    def _fill(self, rank: _Rank, register: str, consumers: tuple[str, ...], values: Values) -> None:
        filling = _Filling(values, len(consumers))
        for value in values.values():
            rank.ledger.hold(value)
        for consumer in consumers:
            self.queues[(rank.part.rank, register, consumer)].append(filling)

    def _put(self, rank: _Rank, actor: Actor, index: int, made: Values) -> None:
        """Fill registers, keep results and new states, let go of the rest."""
        is_last = index == self.game.total((rank.part.rank, actor.name)) - 1
        for register in rank.part.outputs_of[actor.name]:
            if (register.carries and is_last) or (register.keys and not made):
                continue
            filling = {key: made[key] for key in register.keys}
            for value in filling.values():
                rank.ledger.crosses(value)
            self._fill(rank, register.name, register.consumers, filling)
        if not made:
            return
        for result, key in actor.emits:
            rank.keep(rank.emits, result, made[key])
        for state, key in actor.writes:
            if state not in actor.in_place:
                rank.keep(rank.writes, state, made[key])
        for value in made.values():
            rank.ledger.drop(value)

    # The work of a firing.

    def _run(self, rank: _Rank, actor: Actor, index: int, taken: Values) -> Values:
        """Return what an actor makes, held once; what it took is dropped."""
        if actor.kind is ActorKind.COMPUTE:
            return self._compute(rank, actor, index, taken)
        if actor.kind is ActorKind.ACCUMULATE:
            return self._accumulate(rank, actor, index, taken)
        rank.tick(actor, index, actor.name)
        assert all(isinstance(value, StorageView) for value in taken.values()), (
            "boxing moves tensors"
        )
        made: Values = {}
        if actor.kind is ActorKind.SEND:
            self._send(rank, actor, taken)
        else:
            shards = self._receive(actor, (rank.part.rank, actor.name))
            made = {actor.makes: self._boxed(rank, actor, taken)}
            for sender, letter in shards:
                letter.takers -= 1
                if not letter.takers:
                    sender.ledger.drop(letter.value)
        for value in taken.values():
            rank.ledger.drop(value)
        return made

    def _compute(self, rank: _Rank, actor: Actor, index: int, taken: Values) -> Values:
        place = (rank.part.rank, actor.name)
        if place not in self.dying:
            self.dying[place] = dying_keys(actor)
        ledger = rank.ledger
        values = dict(taken)
        for entry, dying in zip(actor.instructions, self.dying[place], strict=True):
            rank.tick(actor, index, entry.node)
            made = self._made(rank, entry, values)
            for key, value in made.items():
                ledger.hold(value)
                ledger.name(key, value)
            values |= made
            for key in dying:
                ledger.drop(values.pop(key))
        returned = keys_out(actor)
        result = {key: values[key] for key in returned}
        for key in values:
            if key not in result:
                ledger.drop(values[key])
        return result

    def _made(self, rank: _Rank, entry: Instruction, values: Values) -> Values:
        """Return the results of an instruction, in storages of its arguments or new ones."""
        found = self.layouts.call(entry, rank.part.rank, values.__getitem__)
        given = keys_in(entry)
        fresh: dict[int, StorageView] = {}
        results: list[Value] = []
        for made in found:
            if not isinstance(made, ResultLayout):
                results.append(made)
                continue
            if made.source >= 0:
                source = values[given[made.source]]
                assert isinstance(source, StorageView), "a view looks at a tensor"
                results.append(StorageView(made.lies, source.storage, source.storage_bytes))
                continue
            if made.fresh not in fresh:
                fresh[made.fresh] = rank.ledger.new(
                    entry.outputs[len(results)],
                    made.lies,
                    made.storage_bytes,
                    module=module_of_node(entry.node),
                )
            results.append(StorageView(made.lies, fresh[made.fresh].storage, made.storage_bytes))
        return dict(zip(entry.outputs, results, strict=True))

    def _accumulate(self, rank: _Rank, actor: Actor, index: int, taken: Values) -> Values:
        """Add to the sums in place; hand them over in the last micro-batch."""
        ledger, sums = rank.ledger, rank.sums
        uses = [part for part, _, _ in actor.accumulates]
        for turn, (part, total, how) in enumerate(actor.accumulates):
            rank.tick(actor, index, total)
            if how is None:
                value = taken[part]
                ledger.hold(value)
                if total in sums:
                    ledger.drop(sums[total])
                sums[total] = value
            elif index == 0 or not isinstance(how, str):  # an extreme is written over in place
                is_sum = not isinstance(how, str)
                product = Instruction(
                    op="aten.mul.Tensor" if is_sum else "aten.clone.default",
                    args=(Ref(part), how) if is_sum else (Ref(part),),
                    outputs=(total,),
                    node=total,
                )
                scaled = self._made(rank, product, taken)[total]
                ledger.hold(scaled)
                ledger.name(total, scaled)
                if index:
                    ledger.drop(scaled)
                else:
                    sums[total] = scaled
                    ledger.crosses(scaled)
            if part not in uses[turn + 1 :]:
                ledger.drop(taken[part])
        if index < self.plan.num_micro_batches - 1:
            return {}
        return {total: sums.pop(total) for _, total, _ in actor.accumulates}

    def _send(self, rank: _Rank, actor: Actor, taken: Values) -> None:
        (value,) = taken.values()
        links = self.game.sends[(rank.part.rank, actor.name)]
        letter = _Letter(value, len(links))
        if links:
            rank.ledger.hold(value)
        for link in links:
            self.letters[link.name].append(letter)

    def _receive(self, actor: Actor, place: ActorId) -> list[tuple[_Rank, _Letter]]:
        """Take the letters of all senders out; of a collective there are none."""
        if actor.kind is not ActorKind.RECEIVE:
            return []
        return [
            (self.ranks[link.sender[0]], self.letters[link.name].popleft())
            for link in self.game.receives[place]
        ]

    def _boxed(self, rank: _Rank, actor: Actor, taken: Values) -> Value:
        """Return the part that a boxing step gives a rank: its own shard, or a new storage."""
        step, ledger = self.plan.steps[actor.step], rank.ledger
        own = next(iter(taken.values()), None)
        bounds = bounds_of(step.shape, *step.target)[rank.part.rank]
        shape = tuple(stop - start for start, stop in bounds)
        lies = contiguous(shape, step.dtype)
        if isinstance(own, StorageView) and _keeps(step, rank.part.rank, own.lies, lies):
            made = own
        else:
            module = module_of_node(actor.makes.split("@", 1)[0])
            made = ledger.new(actor.makes, lies, lies.size_bytes, module=module)
        ledger.hold(made)
        ledger.name(actor.makes, made)
        return made


def _keeps(step: Step, rank: int, own: Strided, wanted: Strided) -> bool:
    """Whether a rank's part after the step is the very shard that it had before."""
    if not own.is_contiguous or own.shape != wanted.shape:
        return False
    if step.kind is StepKind.TRANSFER:
        pieces = transfer_pieces(step)
    elif step.kind is StepKind.ALL_REDUCE:
        return len(step.group(rank)) == 1
    else:
        pieces = collective_pieces(step, step.group(rank))
    mine = [piece for piece in pieces if piece.receiver == rank]
    return len(mine) == 1 and mine[0].sender == rank and mine[0].size_bytes == wanted.size_bytes
