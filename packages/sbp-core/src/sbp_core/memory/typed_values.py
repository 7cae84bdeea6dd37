"""Count the values of a plan's replay, or check their shapes and dtypes, for `sbp_core.check`.

A domain is the kind of values that the interpreter works on. A typed value is the memory layout of
a tensor, or a host number, as in `lifetime`; its storage matters only to a few operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import cast

from sbp_core.boxing.slices import bounds_of
from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    ActorId,
    Collective,
    Compute,
    Instruction,
    Receive,
    Send,
    keys_in,
    keys_out,
)
from sbp_core.compile.dataflow import may_be_view
from sbp_core.compile.overwriting import is_in_place
from sbp_core.compile.physical import PhysicalPlan, StateSlot
from sbp_core.compile.token_game import TokenGame
from sbp_core.errors import PlanError, SbpError, SbpLookupError
from sbp_core.graph.ir import InputKind, TensorType
from sbp_core.graph.primitives import STACK
from sbp_core.interpreter import Domain, Firing
from sbp_core.interpreter.domain import V, Values
from sbp_core.memory.storage_view import (
    CallLayouts,
    LayoutLibrary,
    ResultLayout,
    StorageView,
    StridedLayout,
    Value,
    contiguous,
    first_addend,
    grown_stack,
    number_of,
    placed,
)
from sbp_core.plugins.tensor_library import tensor_library


def installed_layouts() -> CallLayouts | None:
    """Return the caller of operators without data; None if no tensor library is installed."""
    try:
        library = tensor_library()
    except SbpLookupError:
        return None
    return cast(LayoutLibrary, library).call_layouts()


class CountedFillings(Domain[V]):
    """A domain that counts firings, and the values that registers hold at once.

    Attributes:
        firings: The actors of all firings of all ranks, in the order of the replay.
        occupancy: Most values that were alive at once, by (rank, register).
    """

    def __init__(self) -> None:
        self.firings: list[ActorId] = []
        self.occupancy: dict[tuple[int, str], int] = {}

    def fired(self, firing: Firing[Actor], game: TokenGame) -> None:
        """Count the values in the actor's output registers; only this actor can have added some."""
        self.firings.append(firing.id)
        # `TokenGame.waits` lets no actor start without credit. The count is checked here, too, so
        # that the bound is a result of the replay and not an assumption.
        for register in game.plan.by_rank[firing.rank].outputs_of[firing.actor.name]:
            live, key = game.live(firing.rank, register), (firing.rank, register.name)
            if live > register.quota:
                raise PlanError(
                    f"register {register.name} of rank {firing.rank} holds {live} fillings"
                )
            self.occupancy[key] = max(live, self.occupancy.get(key, 0))


class TypedValues(CountedFillings[Value]):
    """A domain whose values have types; it refuses values of wrong types.

    Attributes:
        states: By rank, the states at the begin of a step, by name.
        fed: By rank, for each micro-batch, parts of the batch and scalars by name.

    Args:
        plan: A plan that `verify_plan` accepts.
        layouts: Calls operators without data.
    """

    def __init__(self, plan: PhysicalPlan, layouts: CallLayouts) -> None:
        super().__init__()
        self.plan, self.layouts = plan, layouts
        self._storages = count()
        self._slots: dict[int, Mapping[str, StateSlot]] = {}
        self._ends: dict[tuple[int, bool], Mapping[int, TensorType]] = {}
        #: For each segment, the inputs and results of its last firing: the next one is often equal.
        self._made: dict[tuple[int, str], tuple[Values[object], Values[Value]]] = {}
        self.states: dict[int, Values[Value]] = {}
        self.fed: dict[int, list[Values[Value]]] = {}
        for part in plan.ranks:
            self._slots[part.rank] = {slot.name: slot for slot in part.slots}
            states, fed = dict[str, Value](), dict[str, Value]()
            for slot in part.slots:
                home = states if InputKind(slot.kind).is_state else fed
                home[slot.name] = (
                    number_of(slot)
                    if slot.sbp is None
                    else self._new(contiguous(slot.local_shape, slot.dtype))
                )
            self.states[part.rank] = states
            self.fed[part.rank] = [fed] * plan.num_micro_batches

    def _new(self, layout: StridedLayout) -> StorageView:
        """Return a value in a storage of its own."""
        return StorageView(layout, next(self._storages), layout.size_bytes)

    # Segments.

    def compute(self, firing: Firing[Compute], taken: Values[Value]) -> Values[Value]:
        """See `Domain.compute`; micro-batches with equal inputs have equal results."""
        # Everything about the values that results may depend on.
        shapes: Values[object] = {
            key: value.layout if isinstance(value, StorageView) else type(value)
            for key, value in taken.items()
        }
        known = self._made.get(firing.id)
        if known is None or known[0] != shapes:
            values = dict(taken)
            for instruction in firing.actor.instructions:
                self._call(firing, instruction, values)
            known = shapes, {key: values[key] for key in keys_out(firing.actor)}
            self._made[firing.id] = known
        return dict(known[1])

    def _call(self, firing: Firing[Actor], entry: Instruction, values: Values[Value]) -> None:
        """Add the results of an instruction.

        Raises:
            PlanError: the operator rejects its arguments, or its results have other types.
        """
        where = _where(firing)
        try:
            found = self.layouts.call(entry, firing.rank, values.__getitem__, self.plan.steps)
        except SbpError as error:
            raise error.replaced(PlanError, where=(where, *error.where)) from error
        if len(found) != len(entry.outputs):
            raise PlanError(
                f"{entry.op} makes {len(found)} values, and {list(entry.outputs)} are named",
                where=where,
                accepted="a name for each value that it makes",
            )
        given = keys_in(entry)
        if not may_be_view(entry.op) and not is_in_place(entry.op):
            for one in found:
                # The rules declare views; the proof of overwriting relies on these declarations.
                if isinstance(one, ResultLayout) and one.source >= 0:
                    raise PlanError(
                        f"{entry.op} hands on {given[one.source]!r} itself, which no rule says",
                        where=where,
                        accepted="operators that make new tensors, and those of which rules say "
                        "that they make views",
                    )
        made = placed(found, [values[key] for key in given], lambda _, one: self._new(one.layout))
        values |= zip(entry.outputs, made, strict=True)

    # Boxing and sums.

    def collective(
        self, firings: Sequence[Firing[Collective]], shards: Mapping[int, Value]
    ) -> Mapping[int, Value]:
        """See `Domain.collective`."""
        for firing in firings:
            self._check_shard(firing, shards[firing.rank])
        return {firing.rank: self._boxed(firing) for firing in firings}

    def send(self, firing: Firing[Send], shard: Value) -> None:
        """See `Domain.send`."""
        self._check_shard(firing, shard)

    def receive(self, firing: Firing[Receive], shards: Mapping[int, Value]) -> Value:
        """See `Domain.receive`; the sent value has been checked already."""
        return self._boxed(firing)

    def _boxed(self, firing: Firing[Collective] | Firing[Receive]) -> Value:
        kind = self._end_of(firing, is_target=True)
        return self._new(contiguous(kind.shape, kind.dtype))

    def _check_shard(self, firing: Firing[Collective] | Firing[Send], shard: Value) -> None:
        """Refuse to box a value that is not a shard of the tensor that a boxing step takes."""
        wanted = self._end_of(firing, is_target=False)
        if _type_of(shard) != wanted:
            raise PlanError(
                f"boxes {_said(shard)}",
                where=(_where(firing), str(self.plan.steps[firing.actor.step])),
                accepted=str(wanted),
            )

    def _end_of(
        self, firing: Firing[Collective] | Firing[Send] | Firing[Receive], *, is_target: bool
    ) -> TensorType:
        """Return the type of the rank's shard before or after its boxing step.

        Raises:
            PlanError: the rank has none.
        """
        index = firing.actor.step
        step = self.plan.steps[index]
        end = step.target if is_target else step.source
        if (index, is_target) not in self._ends:
            self._ends[index, is_target] = {
                rank: TensorType(tuple(stop - start for start, stop in bounds), step.dtype)
                for rank, bounds in bounds_of(step.shape, *end).items()
            }
        found = self._ends[index, is_target].get(firing.rank)
        if found is None:
            raise PlanError(
                f"rank {firing.rank} has no shard {'after' if is_target else 'before'} it",
                where=(_where(firing), str(step)),
                accepted=f"ranks {', '.join(map(str, end[0].rank_list))}",
            )
        return found

    def add(
        self,
        firing: Firing[Accumulate],
        term: tuple[str, str, float | str | None],
        total: Value | None,
        part: Value,
    ) -> Value:
        """See `Domain.add`."""
        source, key, how = term
        if not isinstance(part, StorageView):
            raise PlanError(f"sums {_said(part)}", where=_where(firing), accepted="tensors")
        if how is None:
            return part
        values: Values[Value] = {source: part}
        if how == STACK and total is not None:
            values[key] = total
            for entry in grown_stack(source, key):
                self._call(firing, entry, values)
            return values[key]
        self._call(firing, first_addend(source, key, how), values)
        if total is not None and _type_of(values[key]) != _type_of(total):
            raise PlanError(
                f"adds {_said(values[key])} to {_said(total)}",
                where=_where(firing),
                accepted="parts of one shape and dtype",
            )
        return values[key]

    # Results and states.

    def emit(self, firing: Firing[Actor], result: str, value: Value) -> None:
        """See `Domain.emit`."""
        if not isinstance(value, StorageView):
            raise PlanError(
                f"the result {result!r} is {_said(value)}",
                where=_where(firing),
                accepted="a tensor",
            )

    def write(self, firing: Firing[Actor], state: str, value: Value) -> None:
        """See `Domain.write`."""
        slot = self._slots[firing.rank][state]
        wanted = None if slot.sbp is None else TensorType(slot.local_shape, slot.dtype)
        if _type_of(value) != wanted:
            raise PlanError(
                f"the new value of {state!r} is {_said(value)}",
                where=_where(firing),
                accepted="a host number" if wanted is None else str(wanted),
            )


def _where(firing: Firing[Actor]) -> str:
    return f"actor {firing.actor.name!r} of rank {firing.rank}"


def _type_of(value: Value) -> TensorType | None:
    """Return the type of a tensor; None of a host number."""
    if not isinstance(value, StorageView):
        return None
    return TensorType(value.layout.shape, value.layout.dtype)


def _said(value: Value) -> str:
    kind = _type_of(value)
    return "a host number" if kind is None else str(kind)
