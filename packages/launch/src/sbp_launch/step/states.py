"""Which states the programs of a parallel step have, how they lie, and how new ones begin."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import bounds_of
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, PlanError, RunError
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import Session, known_state, state_slots, widened, with_states_of
from sbp_launch.planning.flow import Planned, check_fits
from sbp_launch.step.program import OneDeviceProgram, without_states
from sbp_torch.graph_capture import copied_states, initial_states, trainable


class ProgramStates:
    """The states of some programs over one model."""

    def __init__(self) -> None:
        #: All of them, the first one first; and how they are planned.
        self.programs: list[OneDeviceProgram] = []
        self._planned: list[Planned] = []
        self._forms: list[Planned] = []
        #: The states that a step has updated, or that were loaded.
        self.updated: set[str] = set()
        #: What states there are, to be compared between processes; empty while none was added.
        self.told = ""
        #: The states that updates of some program overwrite.
        self._overwritten: set[str] = set()
        self._seen: LogicalGraph | None = None
        self._plan: PhysicalPlan | None = None
        #: A plan that also has the states of programs that are not started.
        self._all: PhysicalPlan | None = None

    @property
    def plan(self) -> PhysicalPlan:
        """Says where all states are: a plan of the first program, whose ranks hold them all."""
        assert self._plan is not None, "a program is planned"
        return self._plan

    @property
    def planned(self) -> Planned:
        """How the first program is planned."""
        return self._planned[0]

    @property
    def names(self) -> list[str]:
        """The names of all states that ranks hold: those of `state_dict`."""
        return names_of(self.plan)

    @property
    def all_names(self) -> list[str]:
        """The names of all states, also of programs that are not started."""
        return names_of(self._all or self.plan)

    @property
    def stored(self) -> dict[str, str]:
        """How the states of all programs are stored: SBP by name, but for host numbers."""
        slots = state_slots(self._all or self.plan)
        return {name: str(slot.sbp) for name, slot in slots.items() if slot.sbp is not None}

    @property
    def counted(self) -> set[str]:
        """The states that ranks keep as host numbers."""
        return {state for tied in (self._all or self.plan).ties.values() for state in tied}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, those of the first program first."""
        optimizers = {id(one.optimizer): one.optimizer for one in self.programs}
        return [group for one in optimizers.values() for group in one.param_groups]

    # What becomes of them.

    def add(self, program: OneDeviceProgram, planned: Planned) -> None:
        """Note a program.

        Raises:
            ConfigError: with its states, a rank would not fit its memory.
        """
        if self._plan is None or self._all is None:
            self._plan = self._all = planned.plan
            self._overwritten = _overwritten_states(planned.plan)
        else:
            self.check_memory(planned)
            self._all = widened(self._all, planned.plan)
        self.programs.append(program)
        self._planned.append(planned)

    def drop(self, program: OneDeviceProgram) -> None:
        """Forget the last program, which could not be started."""
        assert self.programs[-1] is program, "it was added last"
        self.programs.pop()
        self._planned.pop()
        self._all = self.plan
        for one in self._planned:
            self._all = widened(self._all, one.plan)

    def check_memory(self, planned: Planned) -> None:
        """See that all that is planned fits its ranks' memory, with the states of a further plan.

        Args:
            planned: A program, or one of its forms.

        Raises:
            ConfigError: a rank would not fit its memory.
        """
        everything = widened(self._all or self.plan, planned.plan)
        if {*names_of(everything)} != {*names_of(self._all or self.plan)}:
            for one in (*self._planned, *self._forms, planned):
                with_all = replace(one, plan=widened(one.plan, everything), known_memory=None)
                check_fits(with_all, one.settings.cluster)

    def add_form(self, planned: Planned) -> None:
        """Note a further form of a program, which is started."""
        self._forms.append(planned)

    def forget_forms(self) -> None:
        """Note that no form is kept any more."""
        self._forms.clear()

    def hold(self, plan: PhysicalPlan) -> None:
        """Note that ranks hold the states of a plan, too."""
        before = self.names
        self._plan = widened(self.plan, plan)
        self._all = widened(self._all or self._plan, self._plan)
        self._overwritten |= _overwritten_states(plan)
        if self.names != before:
            self.told = ", ".join(sorted(self.names))

    def note_updated(self, graph: LogicalGraph) -> None:
        """Note that a step has updated states.

        Args:
            graph: Of the step.
        """
        if graph is not self._seen:  # or it is known
            tied = {entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for}
            for name in graph.new_states:
                self.updated.update(tied.get(name, (name,)))
            self._seen = graph

    # What others need.

    def has(self, plan: PhysicalPlan) -> bool:
        """Whether ranks hold all states of a plan, as it keeps them, and may overwrite its own."""
        here = self.plan.ties
        return (
            state_slots(plan).keys() <= state_slots(self.plan).keys()
            and all(here.get(name) == tied for name, tied in plan.ties.items())
            and _overwritten_states(plan) <= self._overwritten
        )

    def moves(self, plan: PhysicalPlan) -> bool:
        """Whether a plan has host numbers for states that ranks keep as tensors."""
        tensors = state_slots(self.plan).keys() - self.plan.ties.keys()
        return any(state in tensors for tied in plan.ties.values() for state in tied)

    def counts_as(self, plan: PhysicalPlan) -> bool:
        """Whether a plan's host numbers stand for the states that they stand for here."""
        here = self.plan.ties
        single = {state for tied in here.values() for state in tied}
        return all(
            here.get(name) == tied or (name not in here and single.isdisjoint(tied))
            for name, tied in plan.ties.items()
        )

    def check_new(self, names: Collection[str]) -> None:
        """See that states which are to be added are of parameters that were not trained so far.

        Raises:
            PlanError: one is not: the optimizer would have had it from the beginning.
        """
        updated = {one.rpartition(".")[0]: one for one in sorted(self.updated)}
        for name in sorted(names):
            if (parameter := name.rpartition(".")[0]) in updated:
                raise PlanError(
                    f"it has the state {name!r}, and {parameter!r} was trained without it: there "
                    f"is {updated[parameter]!r} only",
                    accepted="new states of parameters that were not trained so far",
                )

    def check_optimizer(self, program: OneDeviceProgram) -> None:
        """See that another program has states of its own, or the optimizer of one that is here.

        Raises:
            ConfigError: two optimizers have states of one parameter.
        """
        others = [one for one in self.programs if one.optimizer is not program.optimizer]
        for other in others:
            number = 1 + self.programs.index(other)
            # Also of what is frozen, because it may be trained later.
            both = _own_states(program) & _own_states(other)
            if both:
                raise ConfigError(
                    f"two optimizers have a state {min(both)!r}",
                    where=f"the optimizers of another program and of program {number}",
                    accepted="optimizers over different parameters of the model, or the same "
                    "optimizer",
                    todo="give each its own parameters: Adam(model.critic.parameters()); or train "
                    "both losses by one optimizer: leave out optimizer=; to restart an optimizer, "
                    "empty it between two steps: optimizer.state.clear()",
                )

    def plan_with(self, states: Mapping[str, Tensor]) -> PhysicalPlan:
        """Return the plan with further states, each like its parameter.

        Args:
            states: Whole tensors by name.
        """
        like = {
            name: (
                name.rpartition(".")[0],
                tuple(value.shape),
                str(value.dtype).removeprefix("torch."),
            )
            for name, value in states.items()
        }
        return with_states_of(self.plan, like)

    def fresh(
        self, names: Collection[str], given: Collection[str], read: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Return first values for states of parameters that were not trained at a save.

        Args:
            names: Of states that were not saved.
            given: Of those that were.
            read: Returns one that was.

        Raises:
            ConfigError: nothing of an optimizer was saved.
        """
        found: dict[str, Tensor] = {}
        for number, program in enumerate(self.programs, 1):
            own = _own_states(program)
            saved = {name.rpartition(".")[0] for name in own & set(given)}
            missing = [name for name in names if name in own]
            if missing and not saved:
                raise ConfigError(
                    f"the states have none of the optimizer of program {number}: "
                    f"{min(missing)!r} is missing",
                    accepted="states of all programs of the step",
                    todo="load them before step.add_step(...) puts that program there"
                    if number > 1
                    else "",
                )
            parameters = dict(program.model.named_parameters())
            untrained = [name for name in parameters if name not in saved]
            with trainable(parameters.values()), without_states(program, untrained):
                first = initial_states(program.model, program.optimizer, program.update)
                copies = copied_states(program.model, program.optimizer, program.update)
            for name in missing:
                if name.rpartition(".")[0] in untrained:
                    of = copies.get(name)
                    found[name] = first[name] if of is None else read(of[0]).to(of[1])
        return found

    def frozen_states(self, names: Iterable[str]) -> list[str]:
        """Return the names of states whose parameters are frozen now, in the same order."""
        frozen = {
            name for name, one in self.programs[0].model.named_parameters() if not one.requires_grad
        }
        return [name for name in names if name.rpartition(".")[0] in frozen]


def names_of(plan: PhysicalPlan) -> list[str]:
    """Return the names of the states of a plan: those of `state_dict`."""
    return [state for name in state_slots(plan) for state in plan.ties.get(name, (name,))]


def _overwritten_states(plan: PhysicalPlan) -> set[str]:
    """Return the states that updates of a plan overwrite."""
    return {name for part in plan.distinct for actor in part.actors for name in actor.in_place}


def _own_states(program: OneDeviceProgram) -> set[str]:
    """Return the names of the states that a program has besides those of the model.

    Those of frozen parameters are among them.
    """
    with trainable([*program.model.parameters()]):
        everything = initial_states(program.model, program.optimizer, program.update, copy=False)
    return everything.keys() - initial_states(program.model, copy=False).keys()


def held_whole(session: Session, plan: PhysicalPlan, names: Iterable[str]) -> dict[str, Tensor]:
    """Return states that the one rank of this process holds whole.

    Args:
        session: Of that rank.
        plan: How the states lie.
        names: Of the states.

    Raises:
        RunError: ranks of other processes hold parts of one.
    """
    (rank,), slots = session.local_ranks, state_slots(plan)
    found: dict[str, Tensor] = {}
    for name in names:
        slot = slots[known_state(plan, name)]
        if slot.sbp is None:
            found[name] = torch.tensor(session.shard(name, rank))
            continue
        held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp).get(rank)
        if held != tuple((0, size) for size in slot.shape):
            raise RunError(
                f"{name!r} of the model is asked for, and ranks of other processes hold parts "
                "of it",
                accepted="calls that all processes make: step.copy_to(model, optimizer), "
                "after which both read as what was trained; step.state_dict()",
                todo="call step.copy_to(model, optimizer) in all processes first; to train "
                "from other values, pass states=... to parallelize",
            )
        value = session.shard(name, rank)
        assert isinstance(value, Tensor), "no host number"
        found[name] = value
    return found
