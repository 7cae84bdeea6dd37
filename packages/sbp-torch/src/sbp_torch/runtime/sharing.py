"""Share the states of a session with another session, without copies.

For example, a session for evaluation reads the states that another session trains (`SharedStates`),
or two forms (versions) of the training step update the same states (`KeptStates`). Runtimes call
`store_of` when they start a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from sbp_core.boxing import bounds_of
from sbp_core.compile import PhysicalPlan, StateSlot
from sbp_core.errors import RunError, SbpLookupError, SbpValueError, nearest
from sbp_core.runtime import Session
from sbp_torch.runtime.snapshots import Copier
from sbp_torch.runtime.state_layout import StateLayout, Values
from sbp_torch.runtime.store import StateStore

_ELSE = "plan both alike, or start from the session's state_dict()"


def store_of(
    plan: PhysicalPlan,
    ranks: Iterable[int],
    states: Mapping[str, Tensor] | Session,
    *,
    keeps: bool = False,
) -> StateStore:
    """Return the states of a new session: cut from whole states, or shared with another session.

    Args:
        plan: The plan of the new session.
        ranks: The ranks of this process.
        states: The whole states; or another session that has them.
        keeps: Whether the other session takes the new values that steps of the new session make.

    Raises:
        SbpValueError: a state is missing, or does not agree with the plan.
    """
    if isinstance(states, Session):
        return KeptStates(plan, ranks, states) if keeps else SharedStates(plan, ranks, states)
    store = StateStore(plan, ranks)
    store.load(states)
    return store


class SharedStates(StateStore):
    """The states of another session: the same tensors, with their values when a step begins.

    New values that a step of this session makes are dropped.

    Args:
        plan: The plan. It stores its states as the other session does; it may have fewer.
        ranks: The ranks of this process, which run in the other session, too.
        source: The other session.

    Raises:
        SbpValueError: the other session stores a state differently, or lacks it; the plan
            overwrites a state; or the runtime of the other session uses no `StateStore`.
        SbpLookupError: a rank does not run there.
    """

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int], source: Session) -> None:
        super().__init__(plan, ranks)
        theirs = getattr(source, "store", None)
        if not isinstance(theirs, StateStore):
            raise SbpValueError(
                f"a session of type {type(source).__name__} does not share its states",
                accepted="sessions of the runtimes actor and reference; whole states",
                todo="pass session.state_dict()",
            )
        self._source, self._theirs, self._snapshots = source, theirs, theirs._snapshots
        for rank in self.values:
            if rank not in theirs.values:
                raise SbpLookupError(
                    f"rank {rank} does not run in the session that has the states",
                    accepted=", ".join(map(str, theirs.values)),
                )
        for slot in self.layout.slots.values():
            self._check_slot(slot)
        self._check_overwritten()
        #: Rank -> names of the shared states.
        self._names = {
            rank: [slot.name for slot in plan.by_rank[rank].slots if slot.name in self.layout.slots]
            for rank in self.values
        }
        self.refresh()

    def _check_overwritten(self) -> None:
        written = (
            name for part in self.plan.ranks for actor in part.actors for name in actor.in_place
        )
        if (name := next(written, None)) is not None:
            raise SbpValueError(
                f"the plan overwrites {name!r}, which belongs to another session",
                where="states",
                todo="compile the plan with CompileOptions(in_place_states=False)",
            )

    def _check_slot(self, slot: StateSlot) -> None:
        other = self._theirs.layout.slots.get(slot.name)
        if other is None:
            near = nearest(slot.name, self._theirs.layout.slots)
            raise SbpValueError(
                f"the session has no state {slot.name!r}",
                where="states",
                todo=f"it has {near!r}; {_ELSE}" if near else _ELSE,
            )
        here, there = self._storage(slot, self.plan), self._storage(other, self._theirs.plan)
        if here != there:
            raise SbpValueError(
                f"{slot.name!r} is {_words(slot, self.plan)}, and in the session "
                f"{_words(other, self._theirs.plan)}",
                where="states",
                accepted="states that both plans store alike",
                todo=_ELSE,
            )

    @staticmethod
    def _storage(slot: StateSlot, plan: PhysicalPlan) -> object:
        """Return a description of the storage of a state, to compare."""
        if slot.sbp is None:
            return plan.ties.get(slot.name, ())
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp)
        return slot.shape, slot.dtype, dict(held), slot.offloaded

    def refresh(self) -> None:
        """Take the present tensors of the other session. See `StateStore.refresh`.

        Raises:
            RunError: the states of the other session belong to two steps.
        """
        self._source.pieces()  # raises if the states belong to two steps
        held, updating = self._theirs.values, self._theirs.layout.updating
        if self.layout.updating is not updating:
            self.layout = StateLayout(self.plan, self.values, updating)
        self.values = {
            rank: {name: held[rank][name] for name in names} for rank, names in self._names.items()
        }
        self.tied_dtypes = self._theirs.tied_dtypes

    @property
    def copier(self) -> Copier:
        """See `StateStore.copier`: steps of the other session overwrite the states."""
        return self._theirs.copier

    def close(self) -> None:
        """Do nothing: the other session owns the copies."""

    def commit(self, values: dict[int, Values]) -> None:
        """Drop new values and the references to states, which the other session may replace now."""
        self.values = {rank: {} for rank in self.values}

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Refuse to replace states that belong to another session.

        Raises:
            RunError: always.
        """
        raise RunError(
            "the states belong to another session",
            todo="load them there; this one reads them when its next step begins",
        )

    def widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        """Refuse as `load` does.

        Raises:
            RunError: always.
        """
        self.load(states)

    def replace(self, states: Mapping[str, Tensor]) -> None:
        """Refuse as `load` does.

        Raises:
            RunError: always.
        """
        self.load(states)


class KeptStates(SharedStates):
    """The states of another session, which takes the new values of each step: both train.

    Raises:
        SbpValueError: as for `SharedStates`; or the plan overwrites a state that the other session
            does not overwrite, so that its snapshots would miss the change.
    """

    def _check_overwritten(self) -> None:
        known = self._theirs.layout.places
        for part in self.plan.ranks:
            for name in (name for actor in part.actors for name in actor.in_place):
                if part.rank in self.values and (part.rank, name) not in known:
                    raise SbpValueError(
                        f"the plan overwrites {name!r}, and the session that has it does not",
                        where="states",
                        accepted="plans that overwrite the same states",
                        todo=_ELSE,
                    )

    def commit(self, values: dict[int, Values]) -> None:
        """Make new values the states of the other session, too."""
        theirs = self._theirs
        theirs.commit({rank: {**held, **values[rank]} for rank, held in theirs.values.items()})
        self.values = values


def _words(slot: StateSlot, plan: PhysicalPlan) -> str:
    """Return a description of the storage of a state for messages."""
    if slot.sbp is None:
        return f"a number that stands for {', '.join(plan.ties.get(slot.name, ()))}"
    shape = list(slot.shape)
    stored = f"({slot.sbp})" + " in the memory of the host" * slot.offloaded
    return f"{slot.dtype}{shape} stored as {stored} on ranks {plan.stages[slot.stage].ranks}"
