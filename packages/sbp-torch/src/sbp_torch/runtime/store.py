"""What one rank holds between steps; how whole tensors become parts, and parts whole.

Both runtimes use it, so loading and saving are in one place.
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
    """What a mapping of states has that makes each when it is asked for."""

    def each(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield some of the states by name, in the order in which they are best made."""


@runtime_checkable
class ReadInParts(Protocol):
    """What a mapping of states has that can read a part of one, such as a file."""

    def like(self, name: str) -> Tensor:
        """Return a tensor of a state's shape and dtype, without its values."""

    def part(self, name: str, bounds: Bounds) -> Tensor:
        """Return a part of a state, a tensor of its own: (start, stop) of each dim."""


class StateStore:
    """The states of all local ranks, by rank and name, on the device that the plan is for.

    Raises:
        ConfigError: this machine has no such device.
    """

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int]) -> None:
        self.device = device_of(plan)
        self.values: dict[int, Values] = {rank: {} for rank in ranks}
        self.layout = StateLayout(plan, self.values, [plan])
        #: Those that are not released, which hold values of earlier steps.
        self._snapshots: WeakSet[StateSnapshot] = WeakSet()
        #: Of the states that a host number stands for, as they were last given.
        self.tied_dtypes: dict[str, torch.dtype] = {}
        #: Why there are no states, if what was loaded last has replaced only some; else empty.
        self._lost_by = ""

    @property
    def plan(self) -> PhysicalPlan:
        """The plan of the session, with the states that it was given since."""
        return self.layout.plan

    def refresh(self) -> None:
        """See that there are states, and what they are now, if they are those of another session.

        Raises:
            RunError: there are none.
        """
        if self._lost_by:
            raise RunError(
                f"there are no states: loading replaced them, and {self._lost_by}",
                accepted="states that were loaded to the end",
                todo="call load_state_dict() with other states, or start a new session from a "
                "checkpoint",
            )

    def commit(self, values: dict[int, Values]) -> None:
        """Let new states of all ranks take force."""
        # One assignment, so that an interrupt leaves all of them before it or after it.
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
        """Cut whole states into every local rank's parts, in place of those that are there.

        They are taken one at a time, in the order of the mapping, and let go of before the next is
        asked for: a mapping that makes them on demand, such as `DeferredStates`, never needs to
        hold two. So are those that they replace: next to the parts of the local ranks there is one
        state at most. Of a mapping that makes them on demand, states that no local rank holds are
        not asked for at all; and of one that is read in parts, only those that a local rank holds.

        What is refused is refused before anything is replaced, as far as the mapping can be asked
        for it. What fails after that, such as a file that cannot be read, leaves no states.

        Raises:
            SbpValueError: a state is missing, unknown, or of another shape or dtype; tied states
                differ.
        """
        numbers, held_here = self.layout.numbers, self.layout.held
        self._check_names(states, self.layout.slots, numbers)
        if any(self.values.values()):  # else there is nothing to be kept from harm
            self._check_forms(states, held_here)
        read, dtypes = self._read_numbers(states, numbers)
        # Others keep the mappings that were here: snapshots, and steps.
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
        """Cut some whole states into every local rank's parts; the others stay.

        Raises:
            SbpValueError: one is unknown, or of another shape or dtype; tied states differ.
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
        # Others keep the mappings that were here: snapshots, and steps.
        parts = {rank: dict(held) for rank, held in self.values.items()}
        for name in states.keys() & self.layout.held:
            self._cut(self.layout.slots[name], states[name], parts)
        for held in parts.values():
            held |= read
        self.commit(parts)

    def widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        """Hold the states of another plan, too; what is here stays where it is.

        Args:
            plan: Stores what is here as it is here. A host number may stand for fewer states there:
                then those have one of their own from now on.
            states: Whole tensors, by the names of what only that plan has.

        Raises:
            SbpValueError: one is missing, or of another shape or dtype.
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
        # Others keep the mappings that were here: snapshots, and steps.
        values = {rank: dict(held) for rank, held in self.values.items()}
        if any(not one.is_released for one in self._snapshots):
            for rank, name in after.places.keys() - before.places.keys():
                value = values.get(rank, {}).get(name)
                if isinstance(value, Tensor):  # which a snapshot did not copy
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
        """Replace states of which a local rank has a part, one after the other."""

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
            del whole  # before the next is made

    def _read_numbers(
        self, states: Mapping[str, Tensor], numbers: Mapping[str, str]
    ) -> tuple[dict[str, Number], dict[str, torch.dtype]]:
        """Return the host numbers, by slot, and the dtypes that they were given in, by state."""
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
        """Refuse before anything is made."""
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
        """Refuse states of another shape or dtype, of a mapping that has them, or knows them."""
        for name in names:
            slot = self.layout.slots[name]
            if isinstance(states, ReadInParts):
                check_tensor(name, states.like(name), slot.shape, slot.dtype)
            elif isinstance(states, dict):
                check_tensor(name, states[name], slot.shape, slot.dtype)

    def _cut(self, slot: StateSlot, whole: Tensor, new: Mapping[int, Values]) -> None:
        """Add the local ranks' parts of a state; each is a tensor of its own."""
        check_tensor(slot.name, whole, slot.shape, slot.dtype)
        assert slot.sbp is not None, "else it is a number"
        parts = shard(whole.detach(), self.plan.stages[slot.stage], slot.sbp, new)
        taken = {storage_key(whole)}
        for rank in list(parts):
            part = self._put(slot, parts.pop(rank))
            new[rank][slot.name] = part.clone() if storage_key(part) in taken else part
            taken.add(storage_key(part))

    def _put(self, slot: StateSlot, part: Tensor) -> Tensor:
        """Return a part of a state where it is to be between steps."""
        return self.device.put_host(part) if slot.offloaded else self.device.put(part)

    def _read(self, slot: StateSlot, states: ReadInParts, new: Mapping[int, Values]) -> None:
        """Add the local ranks' parts of a state, and read no others."""
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
        """Yield what the local ranks own of the states; `among`: see `state_owners`."""
        values, tied_dtypes = self.values, self.tied_dtypes
        layout = self.layout
        for rank, name, bounds in layout.owned if among is None else layout.owned_among(among):
            value = part_of(values[rank][name], layout.index(rank, name, bounds))
            for one in layout.slices_of(name, bounds, tied_dtypes):
                yield one.with_value(value)

    @cached_property
    def copier(self) -> Copier:
        """Copies aside what updates overwrite."""
        return Copier(self.device)

    def snapshot(
        self,
        steps_done: int,
        *,
        at_once: bool = False,
        limit_bytes: int | None = None,
        patience_s: float = inf,
    ) -> StateSnapshot:
        """Return what the local ranks own, as it is now.

        Args:
            steps_done: Of the session.
            at_once: Make all copies first, instead of on a thread.
            limit_bytes: Most bytes of copies at a time; None for all, without `at_once`.
            patience_s: Seconds that an update waits for room, before copies go beyond the limit.
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
        """Make all copies of snapshots; let go of what is kept for the next."""
        self.copier.close()

    def number(self, name: str) -> Tensor | None:
        """Return a state that ranks keep as a host number, as a 0-d tensor; None of any other."""
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
    """Go through some of the states, each made when it is its turn."""
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
    """Check a tensor that somebody gives.

    Args:
        name: Of the tensor.
        value: Given; None for nothing.
        shape: Accepted.
        dtype: Accepted.
        where: What it was given in.
        why: Where the accepted shape comes from.
        todo: What to do if the tensor is another.

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
