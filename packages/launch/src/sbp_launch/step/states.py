"""`ProgramStates`: lists all parameters and optimizer states of a parallel step, with layouts.

`Training` asks it which states new programs (other losses and optimizers) add or may overwrite.
"""

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
    """The states of several programs over one model."""

    def __init__(self) -> None:
        #: All programs, in the order in which they were added, and their plans.
        self.programs: list[OneDeviceProgram] = []
        self._planned: list[Planned] = []
        self._forms: list[Planned] = []
        #: The names of states that a step has updated, or that were loaded.
        self.updated: set[str] = set()
        #: The names of all states, to be compared between processes; empty until one is added.
        self.told = ""
        #: The states that updates of some program overwrite.
        self._overwritten: set[str] = set()
        self._seen: LogicalGraph | None = None
        self._plan: PhysicalPlan | None = None
        #: A plan that also has the states of programs that are not started.
        self._all: PhysicalPlan | None = None

    @property
    def plan(self) -> PhysicalPlan:
        """The plan of the first program, extended by all states that ranks hold."""
        assert self._plan is not None, "a program is planned"
        return self._plan

    @property
    def planned(self) -> Planned:
        """The plan of the first program."""
        return self._planned[0]

    @property
    def names(self) -> list[str]:
        """The names of all states that ranks hold: the keys of `state_dict`."""
        return names_of(self.plan)

    @property
    def all_names(self) -> list[str]:
        """The names of all states, including those of programs that are not started."""
        return names_of(self._all or self.plan)

    @property
    def stored(self) -> dict[str, str]:
        """The SBP of all stored states by name, without host numbers."""
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

    # Changes.

    def add(self, program: OneDeviceProgram, planned: Planned) -> None:
        """Register a program.

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
        """Check that all plans fit their ranks' memory, with the states of a further plan.

        Args:
            planned: The further plan: a program, or one of its forms.

        Raises:
            ConfigError: a rank would not fit its memory.
        """
        everything = widened(self._all or self.plan, planned.plan)
        if {*names_of(everything)} != {*names_of(self._all or self.plan)}:
            for one in (*self._planned, *self._forms, planned):
                with_all = replace(one, plan=widened(one.plan, everything), known_memory=None)
                check_fits(with_all, one.settings.cluster)

    def add_form(self, planned: Planned) -> None:
        """Register a further, started form of a program."""
        self._forms.append(planned)

    def forget_forms(self) -> None:
        """Remove all forms."""
        self._forms.clear()

    def hold(self, plan: PhysicalPlan) -> None:
        """Register that ranks hold the states of a further plan."""
        before = self.names
        self._plan = widened(self.plan, plan)
        self._all = widened(self._all or self._plan, self._plan)
        self._overwritten |= _overwritten_states(plan)
        if self.names != before:
            self.told = ", ".join(sorted(self.names))

    def note_updated(self, graph: LogicalGraph) -> None:
        """Register that a step has updated states.

        Args:
            graph: The graph of the step.
        """
        if graph is not self._seen:  # otherwise its states are registered already
            tied = {entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for}
            for name in graph.new_states:
                self.updated.update(tied.get(name, (name,)))
            self._seen = graph

    # Queries.

    def has(self, plan: PhysicalPlan) -> bool:
        """Whether ranks hold all states of a plan as it does, and may overwrite the same states."""
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
        """Whether each host number of a plan stands for the same states as here."""
        here = self.plan.ties
        single = {state for tied in here.values() for state in tied}
        return all(
            here.get(name) == tied or (name not in here and single.isdisjoint(tied))
            for name, tied in plan.ties.items()
        )

    def check_new(self, names: Collection[str]) -> None:
        """Check that the states to be added belong to parameters that were not trained so far.

        Raises:
            PlanError: the parameter of a state was trained without it.
        """
        updated = {one.rpartition(".")[0]: one for one in sorted(self.updated)}
        for name in sorted(names):
            if (parameter := name.rpartition(".")[0]) in updated:
                raise PlanError(
                    f"it has the state {name!r}, but {parameter!r} was trained without it: it has "
                    f"only {updated[parameter]!r}",
                    accepted="new states of parameters that were not trained so far",
                )

    def check_optimizer(self, program: OneDeviceProgram) -> None:
        """Check that a further program has its own states, or an optimizer of a known program.

        Raises:
            ConfigError: two optimizers have states of one parameter.
        """
        others = [one for one in self.programs if one.optimizer is not program.optimizer]
        for other in others:
            number = 1 + self.programs.index(other)
            # Frozen parameters count, too, because they may be trained later.
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
        """Return the plan with further states, each stored like its parameter.

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
            names: The names of states that were not saved.
            given: The names of saved states.
            read: Returns a saved state by its name.

        Raises:
            ConfigError: no state of an optimizer was saved.
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
    """Return the names of the states of a plan: the keys of `state_dict`."""
    return [state for name in state_slots(plan) for state in plan.ties.get(name, (name,))]


def _overwritten_states(plan: PhysicalPlan) -> set[str]:
    """Return the states that updates of a plan overwrite."""
    return {name for part in plan.distinct for actor in part.actors for name in actor.in_place}


def _own_states(program: OneDeviceProgram) -> set[str]:
    """Return the names of a program's states without those of the model.

    They include the optimizer states of frozen parameters.
    """
    with trainable([*program.model.parameters()]):
        everything = initial_states(program.model, program.optimizer, program.update, copy=False)
    return everything.keys() - initial_states(program.model, copy=False).keys()


def held_whole(session: Session, plan: PhysicalPlan, names: Iterable[str]) -> dict[str, Tensor]:
    """Return states that the only rank of this process holds whole.

    Args:
        session: The session of that rank.
        plan: Has the layouts of the states.
        names: The names of the states.

    Raises:
        RunError: ranks of other processes hold parts of a state.
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
