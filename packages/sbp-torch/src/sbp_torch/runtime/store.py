"""`StateStore`: shards of parameters, buffers and optimizer states of the ranks of this process.

It cuts whole tensors into shards (loading), gathers shards into whole tensors (reading), and takes
snapshots (checkpoints). The reference runtime and the actor runtime use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor

from sbp_core.boxing import Bounds, bounds_of
from sbp_core.compile import PhysicalPlan, StateSlot
from sbp_core.errors import RunError, SbpLookupError, SbpTypeError, SbpValueError, words_of
from sbp_core.runtime import StatePiece, known_state, widened
from sbp_torch._torch_compat import storage_key
from sbp_torch.boxing.execute import assemble, shard
from sbp_torch.runtime.devices import device_of
from sbp_torch.runtime.snapshots import Copier, StateSnapshot
from sbp_torch.runtime.state_layout import StateLayout, Values, part_of

if TYPE_CHECKING:
    from sbp_core.runtime import Number

_ONE_NUMBER = "one number: a 0-d tensor"


@runtime_checkable
class MadeOnDemand(Protocol):
    """A mapping of states that creates each state when it is requested."""

    def each(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield some of the states with their names, in the order of least cost to create."""


@runtime_checkable
class ReadInParts(Protocol):
    """A mapping of states that can read a slice of a state, such as a file."""

    def like(self, name: str) -> Tensor:
        """Return a tensor of a state's shape and dtype, without its values."""

    def part(self, name: str, bounds: Bounds) -> Tensor:
        """Return a slice of a state as a new tensor; `bounds` has (start, stop) of each dim."""


class StateStore:
    """The states of all local ranks, by rank and name, on the device that the plan is for.

    Raises:
        ConfigError: this machine has no such device.
    """

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int]) -> None:
        self.device = device_of(plan)
        self.values: dict[int, Values] = {rank: {} for rank in ranks}
        self.layout = StateLayout(plan, self.values, [plan])
        #: Snapshots, which may hold values of earlier steps.
        self._snapshots: WeakSet[StateSnapshot] = WeakSet()
        #: State that is kept as a host number -> dtype when it was last loaded.
        self.tied_dtypes: dict[str, torch.dtype] = {}
        #: Why there are no states, if the last load has replaced only some of them; else empty.
        self._lost_by = ""

    @property
    def plan(self) -> PhysicalPlan:
        """The plan of the session, extended by the states of later plans (`widen`)."""
        return self.layout.plan

    def refresh(self) -> None:
        """Raise an error if a failed load has left no states.

        `SharedStates` also updates its references to the states of another session.

        Raises:
            RunError: there are no states.
        """
        if self._lost_by:
            raise RunError(
                f"there are no states: loading replaced them, and {self._lost_by}",
                accepted="states that were loaded to the end",
                todo="call load_state_dict() with other states, or start a new session from a "
                "checkpoint",
            )

    def commit(self, values: dict[int, Values]) -> None:
        """Replace the states of all ranks by new ones."""
        # One assignment, so that after an interrupt, all of them are old or all are new.
        self.values = values

    def shard(self, name: str, rank: int) -> Tensor | Number:
        """Return one rank's part of a state (not a copy).

        Raises:
            SbpLookupError: there is no such state, the rank does not run in this process, or it is
                of a stage that does not hold the state.
        """
        name = known_state(self.plan, name)
        if rank not in self.values:
            here = ", ".join(map(str, self.values))
            is_known = rank in self.plan.by_rank
            raise SbpLookupError(
                f"rank {rank} runs in another process" if is_known else f"there is no rank {rank}",
                accepted=f"ranks of this process: {here}",
                todo="ask in that process; state_dict() returns whole states" if is_known else "",
            )
        if name not in self.values[rank]:
            holders = [r for r, held in self.values.items() if name in held]
            raise SbpLookupError(
                f"rank {rank} holds no part of {name!r}, which is on another stage",
                accepted=f"ranks {', '.join(map(str, holders))}" if holders else "",
            )
        return self.values[rank][name]

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Replace all states: cut whole states into the shards of the local ranks.

        States are taken one at a time, in the order of the mapping. The old shards of a state are
        freed before its new ones are created. So memory holds the local shards and at most one
        whole state. A `MadeOnDemand` mapping, such as `DeferredStates`, is not asked for states
        without a local shard, and of a `ReadInParts` mapping only local slices are read.

        Names, shapes and dtypes are checked first, as far as the mapping knows them. If loading
        fails after that, such as on a file that cannot be read, the store has no states.

        Raises:
            SbpValueError: a state is missing, unknown, or of another shape or dtype; tied states
                differ.
        """
        numbers, held_here = self.layout.numbers, self.layout.held
        self._check_names(states, self.layout.slots, numbers)
        if any(self.values.values()):  # else there are no states to protect
            self._check_forms(states, held_here)
        read, dtypes = self._read_numbers(states, numbers)
        # Copy the dicts: snapshots and running steps still use the old ones.
        values = {rank: dict(held) for rank, held in self.values.items()}
        try:
            self._lost_by, self.values = "that was interrupted", values
            self._replace(states, held_here, values)
            for held in values.values():
                held |= read
            self.tied_dtypes, self._lost_by = dtypes, ""
        except BaseException as error:
            self._lost_by = words_of(error)
            raise

    def replace(self, states: Mapping[str, Tensor]) -> None:
        """Replace some states: cut whole states into the shards of the local ranks.

        Raises:
            SbpValueError: a state is unknown, or of another shape or dtype; tied states differ.
        """
        numbers: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, whole in states.items():
            slot = self.layout.slots[known_state(self.plan, name)]
            if slot.sbp is None:
                numbers[slot.name][name] = whole
            else:
                check_tensor(name, whole, slot.shape, slot.dtype)
        read: dict[str, Number] = {}
        for slot_name, given in numbers.items():
            kept = {name: self.whole(name) for name in self.layout.names_of(slot_name)}
            values = {name: _one_number(name, one) for name, one in {**kept, **given}.items()}
            read[slot_name] = _tied_number(slot_name, values)
        # Copy the dicts: snapshots and running steps still use the old ones.
        parts = {rank: dict(held) for rank, held in self.values.items()}
        for name in states.keys() & self.layout.held:
            self._cut(self.layout.slots[name], states[name], parts)
        for held in parts.values():
            held |= read
        self.commit(parts)

    def widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        """Add the states of another plan. Existing shards do not move.

        Args:
            plan: The plan. It stores the existing states as this store does. If a host number
                stands for fewer states in it, they get a separate number.
            states: Whole tensors of the states that only the new plan has, by name.

        Raises:
            SbpValueError: a state is missing, or of another shape or dtype.
        """
        before = self.layout
        after = StateLayout(widened(before.plan, plan), self.values, (*before.updating, plan))
        for name in after.names:
            if name not in before.names and name not in states:
                raise SbpValueError(f"{name!r} is missing", accepted="every state that is new")
        read: dict[str, Number] = {}
        dtypes = dict(self.tied_dtypes)
        for slot_name in {*after.numbers.values()}:
            names = after.names_of(slot_name)
            if slot_name in before.slots and before.names_of(slot_name) == names:
                continue
            taken = {
                name: self.whole(name) if name in before.names else states[name] for name in names
            }
            numbers = {name: _one_number(name, one) for name, one in taken.items()}
            read[slot_name] = _tied_number(slot_name, numbers)
            dtypes |= {name: one.dtype for name, one in taken.items()}
        # Copy the dicts: snapshots and running steps still use the old ones.
        values = {rank: dict(held) for rank, held in self.values.items()}
        if any(not one.is_released for one in self._snapshots):
            for rank, name in after.places.keys() - before.places.keys():
                value = values.get(rank, {}).get(name)
                if isinstance(value, Tensor):  # now updated in place, and not copied by a snapshot
                    values[rank][name] = self._put(before.slots[name], value.clone())
        self.layout = after
        try:
            for name, whole in _each(states, after.held - before.held):
                self._cut(after.slots[name], whole, values)
        except BaseException:
            self.layout = before
            raise
        for held in values.values():
            for name in before.slots.keys() - after.slots.keys():
                del held[name]
            held |= read
        self.tied_dtypes = dtypes
        self.commit(values)

    def _replace(
        self, states: Mapping[str, Tensor], names: Collection[str], values: Mapping[int, Values]
    ) -> None:
        """Replace the states that have a local shard, one after the other."""

        def let_go(name: str) -> None:
            for held in values.values():
                held.pop(name, None)

        if isinstance(states, ReadInParts):
            for name in names:
                let_go(name)
                self._read(self.layout.slots[name], states, values)
            return
        for name, whole in _each(states, names):
            let_go(name)
            self._cut(self.layout.slots[name], whole, values)
            del whole  # before the next state is created

    def _read_numbers(
        self, states: Mapping[str, Tensor], numbers: Mapping[str, str]
    ) -> tuple[dict[str, Number], dict[str, torch.dtype]]:
        """Return the host numbers by slot, and the dtypes of the given tensors by state."""
        found: dict[str, dict[str, Number]] = defaultdict(dict)
        dtypes: dict[str, torch.dtype] = {}
        for name, value in _each(states, numbers):
            found[numbers[name]][name] = _one_number(name, value)
            dtypes[name] = value.dtype
        return {name: _tied_number(name, values) for name, values in found.items()}, dtypes

    def _check_names(
        self,
        states: Mapping[str, Tensor],
        slots: Mapping[str, StateSlot],
        numbers: Mapping[str, str],
    ) -> None:
        """Refuse missing and unknown names, before any state is created."""
        for name, slot in slots.items():
            if slot.sbp is not None and name not in states:
                check_tensor(name, None, slot.shape, slot.dtype)
        for name in numbers:
            if name not in states:
                raise SbpValueError(f"{name!r} is missing", accepted=_ONE_NUMBER)
        unknown = sorted(states.keys() - numbers.keys() - slots.keys())
        if unknown:
            raise SbpValueError(
                f"the plan has no state called {unknown[0]!r}",
                accepted=", ".join(sorted(slots)[:6]) + ", ...",
            )

    def _check_forms(self, states: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Refuse states of another shape or dtype, if the mapping knows them beforehand."""
        for name in names:
            slot = self.layout.slots[name]
            if isinstance(states, ReadInParts):
                check_tensor(name, states.like(name), slot.shape, slot.dtype)
            elif isinstance(states, dict):
                check_tensor(name, states[name], slot.shape, slot.dtype)

    def _cut(self, slot: StateSlot, whole: Tensor, new: Mapping[int, Values]) -> None:
        """Add the local ranks' shards of a state; no two of them share memory."""
        check_tensor(slot.name, whole, slot.shape, slot.dtype)
        assert slot.sbp is not None, "else it is a number"
        parts = shard(whole.detach(), self.plan.stages[slot.stage], slot.sbp, new)
        taken = {storage_key(whole)}
        for rank in list(parts):
            part = self._put(slot, parts.pop(rank))
            new[rank][slot.name] = part.clone() if storage_key(part) in taken else part
            taken.add(storage_key(part))

    def _put(self, slot: StateSlot, part: Tensor) -> Tensor:
        """Return a shard on the device, or in host memory if the state is offloaded."""
        return self.device.put_host(part) if slot.offloaded else self.device.put(part)

    def _read(self, slot: StateSlot, states: ReadInParts, new: Mapping[int, Values]) -> None:
        """Add the local ranks' shards of a state; read only these slices."""
        check_tensor(slot.name, states.like(slot.name), slot.shape, slot.dtype)
        assert slot.sbp is not None, "else it is a number"
        bounds = bounds_of(slot.shape, self.plan.stages[slot.stage], slot.sbp)
        read: dict[Bounds, Tensor] = {}
        for rank in bounds.keys() & new.keys():
            held = read.get(bounds[rank])
            if held is None:
                part = states.part(slot.name, bounds[rank])
                held = read[bounds[rank]] = self._put(slot, part.contiguous())
                new[rank][slot.name] = held
            else:
                copy = held.clone()
                new[rank][slot.name] = self._put(slot, copy) if slot.offloaded else copy

    def pieces(self, among: Collection[int] | None = None) -> Iterator[StatePiece]:
        """Yield the slices that the local ranks own; for `among`, see `state_owners`."""
        values, tied_dtypes = self.values, self.tied_dtypes
        layout = self.layout
        for rank, name, bounds in layout.owned if among is None else layout.owned_among(among):
            value = part_of(values[rank][name], layout.index(rank, name, bounds))
            for one in layout.slices_of(name, bounds, tied_dtypes):
                yield one.with_value(value)

    @cached_property
    def copier(self) -> Copier:
        """The object that copies states for snapshots before updates overwrite them."""
        return Copier(self.device)

    def snapshot(
        self,
        steps_done: int,
        *,
        at_once: bool = False,
        limit_bytes: int | None = None,
        patience_s: float = inf,
    ) -> StateSnapshot:
        """Return a snapshot of the slices that the local ranks own.

        Args:
            steps_done: Number of steps that the session has done.
            at_once: Whether to make all copies now, instead of on a thread.
            limit_bytes: Largest size of all copies at a time; None for no limit. Only without
                `at_once`.
            patience_s: Seconds that an update waits for room before copies exceed the limit.
        """
        assert not at_once or limit_bytes is None, "nobody reads yet"
        made = StateSnapshot(
            self.values,
            self.tied_dtypes,
            self.layout,
            self.copier,
            self.device.now(),
            steps_done,
            limit_bytes,
            patience_s,
        )
        self._snapshots.add(made)
        if at_once:
            made.copy_all()
        else:
            made.copy_on_thread()
        return made

    def close(self) -> None:
        """Make all copies of snapshots; free the memory that is kept for later ones."""
        self.copier.close()

    def number(self, name: str) -> Tensor | None:
        """Return a state that ranks keep as a host number, as a 0-d tensor; None for a tensor."""
        slot = self.layout.slots[known_state(self.plan, name)]
        if slot.sbp is not None:
            return None
        number = next(iter(self.values.values()))[slot.name]
        dtypes = [self.tied_dtypes[tied] for tied in self.layout.names_of(slot.name)]
        return torch.tensor(number, dtype=self.tied_dtypes.get(name, dtypes[0]))

    def whole(self, name: str) -> Tensor:
        """Return a state as a whole tensor, a copy on the CPU, if all ranks are in this process.

        Raises:
            SbpLookupError: there is no such state.
        """
        number = self.number(name)
        if number is not None:
            return number
        slot = self.layout.slots[name]
        assert slot.sbp is not None, "else it is a number"
        stage = self.plan.stages[slot.stage]
        parts = {rank: self.values[rank][name] for rank in stage.rank_list}
        tensors = {rank: part for rank, part in parts.items() if isinstance(part, Tensor)}
        return self.device.fetch(assemble(tensors, stage, slot.sbp, slot.shape).clone())


def _each(states: Mapping[str, Tensor], names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield some of the states with their names; create each only when it is needed."""
    if isinstance(states, MadeOnDemand):
        yield from states.each(names)
        return
    for name in states:
        if name in names:
            yield name, states[name]


def _one_number(name: str, value: Tensor) -> Number:
    if value.numel() != 1:
        raise SbpValueError(f"{name!r} is of shape {tuple(value.shape)}", accepted=_ONE_NUMBER)
    return value.item()


def _tied_number(name: str, found: Mapping[str, Number]) -> Number:
    """Return the host number that several equal states stand for."""
    if len(set(found.values())) != 1:
        raise SbpValueError(
            f"the states tied into {name!r} are not one number: {dict(found)}",
            accepted="equal step counters on all parameters",
            todo="compile without tying them: compile.passes.counters_apart=true, in Python "
            "PassOptions(counters_apart=True)",
        )
    return next(iter(found.values()))


def check_tensor(
    name: str,
    value: object,
    shape: Sequence[int],
    dtype: str,
    where: str = "states",
    why: str = "",
    todo: str = "",
) -> None:
    """Check a tensor that a caller passes.

    Args:
        name: The name of the tensor.
        value: The value to check; None if it is missing.
        shape: The accepted shape.
        dtype: The accepted dtype.
        where: The argument that contains the tensor, for messages.
        why: The reason for the accepted shape, for messages.
        todo: Advice for a tensor of another shape.

    Raises:
        SbpValueError: it is missing, or of another shape or dtype.
        SbpTypeError: it is no tensor.
    """
    wanted = f"{dtype} of shape {tuple(shape)}" + (f": {why}" if why else "")
    if value is None:
        raise SbpValueError(f"{name!r} is missing", where=where, accepted=wanted)
    if not isinstance(value, Tensor):
        raise SbpTypeError(
            f"{name!r} is of type {type(value).__name__}",
            where=where,
            accepted=f"a tensor: {wanted}",
        )
    if tuple(value.shape) != tuple(shape) or str(value.dtype) != f"torch.{dtype}":
        if tuple(value.shape) == tuple(shape):
            todo = f"convert it: .to(torch.{dtype})"
        raise SbpValueError(
            f"{name!r} is {value.dtype} of shape {tuple(value.shape)}",
            where=where,
            accepted=wanted,
            todo=todo,
        )
